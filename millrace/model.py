"""The policy's Hugging Face folder: found, checked and loaded. Nothing is ever downloaded."""

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millrace.errors import ModelFolderError
from storage import layout
from storage.errors import NotInStore
from storage.files import FileRef, get_file, put_file
from storage.store import Store

# Stage logs are read by people; a progress bar over 29 tensors is noise in them.
logging.disable_progress_bar()


def start_folder(store: Store, path: str | None, cache: Path) -> Path:
    """Where the base model lies: the folder the config names, or the one that bootstrap put into the run.

    Of a run on no file system of this machine, its files are copied into the folder `cache` once. Raises
    ModelFolderError where the run has none yet, and StreamCorrupt where a file of it is damaged.
    """
    if path is not None:
        return Path(path).expanduser()
    try:
        manifest = json.loads(bytes(store.get(layout.START_MANIFEST)))
    except NotInStore as error:
        raise ModelFolderError(f"{store.url}: the run has no start model yet") from error
    files = {name: get_file(store, FileRef(**ref)) for name, ref in manifest["files"].items()}
    return store.local_path(layout.START_MODEL) or _copied(files, cache / layout.START_MODEL)


def store_start_model(store: Store, folder: Path) -> None:
    """Puts the files of `folder` into the run as its start model: whole, or, without the manifest, not at all."""
    store.delete_tree(layout.START_MODEL)
    files = {
        file.name: asdict(put_file(store, f"{layout.START_MODEL}/{file.name}", file.read_bytes()))
        for file in sorted(folder.iterdir())
    }
    store.put_if_absent(layout.START_MANIFEST, json.dumps({"files": files}, indent=1).encode())


def _copied(files: dict[str, memoryview], folder: Path) -> Path:
    """`files` as a folder, which other stages of this machine may be making too."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            for name, data in files.items():
                (made / name).write_bytes(data)
            # Whoever is first: the files are the same.
            with suppress(OSError):
                made.rename(folder)
    return folder


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in `folder`, in `dtype`. Raises ModelFolderError."""
    _check(folder)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: not a causal language model that transformers can load: {error}") from error


def empty_model(folder: Path) -> PreTrainedModel:
    """The model in `folder` without its values: names and shapes of its parameters. Raises ModelFolderError."""
    _check(folder)
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return model
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
