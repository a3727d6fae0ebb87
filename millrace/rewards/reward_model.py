"""A Hugging Face sequence-classification model as the reward: its one logit.

prompts, responses ─► tokenizer, with its chat template where it has one ─► batches ─► model ─► a logit each

It runs in the scorer's process, on the scorer's threads or GPU: it runs no foreign code, so nothing is isolated. Each
replica of the scorer has a copy.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import ModelFolderError
from millrace.models.weight_files import content_digest
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
            raise ModelFolderError("null", key="scoring.model", expected="the folder of a reward model")
        self._folder = Path(model).expanduser()
        self._device = device
        _check_folder(self._folder)

    def load(self) -> None:
        """Load the model and its tokenizer from the folder alone; hash its files, a second or two per gigabyte.

        Raises ModelFolderError if they can't be read.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        load_model = AutoModelForSequenceClassification.from_pretrained
        self._tokenizer: PreTrainedTokenizerBase
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            model = load_model(self._folder, local_files_only=True, dtype="auto")
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise _unusable(self._folder, f"can't be loaded ({error})", "a model folder with its tokenizer") from error
        self._model: PreTrainedModel = model.to(self._device).eval()
        added = self._tokenizer.added_tokens_decoder.values()
        self._marks = [token.content for token in added if token.special and len(token.content) > 1]
        self.version = f"2 {self._folder.name} {content_digest(self._folder)}"

    def score(self, prompt: Prompt, response: str) -> Score:
        """`score_batch` scores many in the same time."""
        return self.score_batch([(prompt, response)])[0]

    def score_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One forward pass for all, or one for each if the model has no padding token."""
        tokens = [self._tokens(prompt, response) for prompt, response in pairs]
        most = getattr(self._model.config, "max_position_embeddings", None) or math.inf
        fitting = [row for row, ids in enumerate(tokens) if 0 < len(ids) <= most]
        # The model finds each row's last token by the padding token in its config, which may not be the tokenizer's.
        padding = self._model.config.get_text_config().pad_token_id
        batches = [fitting] if padding is not None else [[row] for row in fitting]
        logits: dict[int, float] = {}
        for rows in filter(None, batches):
            logits |= zip(rows, self._logits([tokens[row] for row in rows], padding or 0), strict=True)
        return [
            Score(reward=logits[row]) if row in logits else failed(f"{len(ids):,} tokens; expected 1 to {most:,}")
            for row, ids in enumerate(tokens)
        ]

    def _tokens(self, prompt: Prompt, response: str) -> list[int]:
        # A mark such as <|im_end|> would end the turn that is judged.
        for mark in self._marks:
            response = response.replace(mark, f"{mark[0]} {mark[1:]}")
        text, has_special_tokens = prompt.text + response, False
        if self._tokenizer.chat_template is not None:
            messages = prompt.messages or ({"role": "user", "content": prompt.text},)
            chat: list[Any] = [*messages, {"role": "assistant", "content": response}]
            # The template writes the special tokens itself.
            text, has_special_tokens = str(self._tokenizer.apply_chat_template(chat, tokenize=False)), True
        tokens: list[int] = self._tokenizer(text, add_special_tokens=not has_special_tokens)["input_ids"]
        return tokens

    def _logits(self, tokens: list[list[int]], padding: int) -> list[float]:
        import torch

        rows = [torch.tensor(row) for row in tokens]
        # Padded on the right and masked.
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        mask_BT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        with torch.inference_mode():
            logits_B1 = self._model(input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device)).logits
        values: list[float] = logits_B1[:, 0].float().tolist()
        return values


def _check_folder(folder: Path) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = [str(name) for name in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError) as error:
        raise _unusable(folder, "has no config.json of a model", "a Hugging Face model folder") from error
    if not any(name.endswith(_HEAD) for name in architectures):
        read = f"has the architecture {', '.join(architectures) or 'null'}"
        raise _unusable(folder, read, f"one that ends in {_HEAD}")
    # A config that names no labels has two, as transformers counts.
    num_labels = len(config.get("id2label") or {"0": "", "1": ""})
    if num_labels != 1:
        raise _unusable(folder, f"has {num_labels} labels", "one, whose logit is the reward")
    if not list(folder.glob("*.safetensors")):
        raise _unusable(folder, "has no weights", "*.safetensors files")
    if not (folder / "tokenizer_config.json").is_file():
        raise _unusable(folder, "has no tokenizer_config.json", "the model's tokenizer")


def _unusable(folder: Path, read: str, expected: str) -> ModelFolderError:
    return ModelFolderError(f"'{folder}', which {read}", key="scoring.model", expected=expected)
