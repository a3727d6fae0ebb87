"""The policy's Hugging Face folder: checked and loaded. Nothing is ever downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millrace.errors import ModelFolderError
from storage.json_text import parse_json

# A progress bar over tensors is noise in the logs of stages.
logging.disable_progress_bar()


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in `folder`, in `dtype`. Raises ModelFolderError."""
    with _refused_in_a_sentence(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        # transformers' default attention, sdpa, leaves soft caps out without a word.
        attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), local_files_only=True, **attention
        )


def empty_model(folder: Path) -> PreTrainedModel:
    """The model in `folder` without values: names and shapes of its parameters. Raises ModelFolderError."""
    with _refused_in_a_sentence(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model


def load_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, which must have an end-of-sequence token. Raises ModelFolderError.

    `chat_template` is Jinja that replaces its own chat template; None keeps that.
    """
    with _refused_in_a_sentence(folder, what="tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(f"{folder}: its tokenizer has no end-of-sequence token, so no response could stop")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def end_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response of the model in `folder`: its tokenizer's, and those of generation_config.json.

    An instruct model often ends its turn with another token than the one that ends a text. Raises ModelFolderError.
    """
    path = folder / "generation_config.json"
    found: object = None
    if path.is_file():
        try:
            found = parse_json(path.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelFolderError(f"{path}: can't be read ({error}); expected a JSON object") from error
    more = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(one, int) for one in more):
        raise ModelFolderError(f"{path}: eos_token_id is {found}; expected token ids")
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *more]))


@contextmanager
def _refused_in_a_sentence(folder: Path, what: str = "causal language model") -> Iterator[None]:
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder; expected a Hugging Face causal language model")
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: not a {what} that transformers can load: {error}") from error
    except Exception as error:
        # transformers takes a file's values apart without looking at them, and `tokenizers` raises bare Exceptions.
        if (
            not isinstance(error, KeyError | TypeError | AttributeError | RecursionError)
            and type(error) is not Exception
        ):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ModelFolderError(f"{folder}: not a {what} that transformers can load ({reason})") from error
