"""The policy's Hugging Face folder: found, checked and loaded. Nothing is ever downloaded."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millrace.errors import ModelFolderError
from storage import layout
from storage.store import Store

# Stage logs are read by people; a progress bar over 29 tensors is noise in them.
logging.disable_progress_bar()


def start_folder(store: Store, path: str | None) -> Path:
    """Where the base model lies: the folder the config names, or the one that bootstrap put into the run."""
    if path is not None:
        return Path(path).expanduser()
    local = store.local_path(layout.START_MODEL)
    if local is None:
        raise ModelFolderError(f"{store.url}: a bootstrapped model needs a run on a local file system")
    return local


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in `folder`, in `dtype`. Raises ModelFolderError."""
    _check(folder)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: not a causal language model that transformers can load: {error}") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, which must have an end-of-sequence token. Raises ModelFolderError."""
    _check(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: not a tokenizer that transformers can load: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(f"{folder}: its tokenizer has no end-of-sequence token, so no response could stop")
    return tokenizer


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder; expected a Hugging Face causal language model")
