"""The policy's Hugging Face folder: checked and loaded. Nothing is ever downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millrace.errors import ModelFolderError

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


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, which must have an end-of-sequence token. Raises ModelFolderError."""
    with _refused_in_a_sentence(folder, what="tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(f"{folder}: its tokenizer has no end-of-sequence token, so no response could stop")
    return tokenizer


@contextmanager
def _refused_in_a_sentence(folder: Path, what: str = "causal language model") -> Iterator[None]:
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder; expected a Hugging Face causal language model")
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: not a {what} that transformers can load: {error}") from error
