"""A Hugging Face sequence-classification model as the reward: its one logit.

prompts, responses ─► tokenizer, with its chat template where it has one ─► batches ─► model ─► a logit each

It runs in the scorer's own process, on the scorer's threads or GPU: it runs no foreign code, so nothing is isolated.
Each replica of the scorer has a copy.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import ModelFolderError
from millrace.rewards.base import Reward, Score, failed
from millrace.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HEAD = "ForSequenceClassification"


class RewardModel(Reward):
    """The logit of a sequence-classification model with one label, in that model's own unit.

    A response that, with its prompt, is too long for the model is an error: truncation could remove the answer.
    """

    name = "reward_model"
    batch_size = 16

    def __init__(self, *, model: str | None = None, device: str = "cpu") -> None:
        """`model`: the folder, with its tokenizer; `device`: `cpu` or `cuda`.

        Raises ModelFolderError for a folder that can't be used; loads no weights.
        """
        if model is None:
            raise ModelFolderError("scoring.model is null; expected the folder of a reward model")
        self._folder = Path(model).expanduser()
        self._device = device
        _check_folder(self._folder)

    def load(self) -> None:
        """Load the model and its tokenizer from the folder alone; hash its files, a second or two per gigabyte.

        Raises ModelFolderError if they can't be read.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True
            )
            loaded = AutoModelForSequenceClassification.from_pretrained(
                self._folder, local_files_only=True, dtype="auto"
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ModelFolderError(
                f"scoring.model {str(self._folder)!r} can't be loaded ({reason}); "
                "expected a Hugging Face model folder with its tokenizer"
            ) from error
        self._model: PreTrainedModel = loaded.to(self._device).eval()
        self.version = f"{self._folder.name} {_hash(self._folder)}"

    def score(self, prompt: Prompt, response: str) -> Score:
        """`score_batch` scores many in the same time."""
        [score] = self.score_batch([(prompt, response)])
        return score

    def score_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One forward pass for all, or one for each if the model has no padding token."""
        tokens = [self._tokens(prompt, response) for prompt, response in pairs]
        most = getattr(self._model.config, "max_position_embeddings", None) or math.inf
        fitting = [row for row, ids in enumerate(tokens) if 0 < len(ids) <= most]
        logits = dict(zip(fitting, self._logits([tokens[row] for row in fitting]), strict=True))
        return [
            _score(logits[row]) if row in logits else failed(f"{len(ids):,} tokens; expected 1 to {most:,}")
            for row, ids in enumerate(tokens)
        ]

    def _tokens(self, prompt: Prompt, response: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            plain: list[int] = self._tokenizer(prompt.text + response)["input_ids"]
            return plain
        asked = prompt.messages or ({"role": "user", "content": prompt.text},)
        chat: list[Any] = [*asked, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        # The template writes the special tokens itself.
        whole: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return whole

    def _logits(self, tokens: list[list[int]]) -> list[float]:
        import torch

        if not tokens:
            return []
        # The model finds each row's last token by the padding token in its config, which may not be the tokenizer's.
        padding = self._model.config.get_text_config().pad_token_id
        if padding is None and len(tokens) > 1:
            return [logit for row in tokens for logit in self._logits([row])]
        rows = [torch.tensor(row) for row in tokens]
        masks = [torch.ones_like(row) for row in rows]
        # Padded on the right and masked.
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding or 0)
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        with torch.inference_mode():
            logits_B1 = self._model(input_ids=inputs.to(self._device), attention_mask=mask.to(self._device)).logits
        values: list[float] = logits_B1[:, 0].float().tolist()
        return values


def _score(logit: float) -> Score:
    return Score(reward=logit) if math.isfinite(logit) else failed(f"the logit is {logit}; expected a finite number")


def _check_folder(folder: Path) -> None:
    where = f"scoring.model {str(folder)!r}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = [str(name) for name in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFolderError(f"{where}: no config.json of a model; expected a Hugging Face model folder") from error
    if not any(name.endswith(_HEAD) for name in architectures):
        found = ", ".join(architectures) or "nothing"
        raise ModelFolderError(f"{where}: its architecture is {found}; expected one that ends in {_HEAD}")
    # A config that names no labels has two, as transformers counts.
    num_labels = len(config.get("id2label") or {"0": "", "1": ""})
    if num_labels != 1:
        raise ModelFolderError(f"{where}: it has {num_labels} labels; expected one, whose logit is the reward")
    if not list(folder.glob("*.safetensors")):
        raise ModelFolderError(f"{where}: no weights; expected *.safetensors files")
    if not (folder / "tokenizer_config.json").is_file():
        raise ModelFolderError(f"{where}: no tokenizer_config.json; expected the model's tokenizer beside it")


def _hash(folder: Path) -> str:
    """SHA-256 of every file that affects the model's output; 12 hex digits."""
    whole = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.jinja")]):
        with file.open("rb") as content:
            whole.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:12]
