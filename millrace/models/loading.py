"""The policy's Hugging Face folder: found, checked and loaded. Nothing is ever downloaded."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from millrace.errors import ModelFolderError
from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file, put_file

# A progress bar over tensors is noise in the logs of stages.
logging.disable_progress_bar()


def start_folder(store: Store, path: str | None, cache: Path) -> Path:
    """The folder of the base model: the configured one, or the one that bootstrap put into the run.

    For a run in an object store, its files are copied into the folder `cache` once. Raises ModelFolderError if the run
    has none yet, and StreamCorrupt if one of its files is damaged.
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
    """Puts the files of `folder` into the run as its start model. The manifest, written last, makes it whole."""
    store.delete_tree(layout.START_MODEL)
    files = {
        file.name: asdict(put_file(store, f"{layout.START_MODEL}/{file.name}", file.read_bytes()))
        for file in sorted(folder.iterdir())
    }
    store.put_if_absent(layout.START_MANIFEST, json.dumps({"files": files}, indent=1).encode())


def _copied(files: dict[str, memoryview], folder: Path) -> Path:
    """`files` as a folder, which other stages on this machine may be writing too."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            for name, data in files.items():
                (made / name).write_bytes(data)
            # Another stage may have been first, with the same files.
            with suppress(OSError):
                made.rename(folder)
    return folder


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in `folder`, in `dtype`. Raises ModelFolderError."""
    with _refused_in_a_sentence(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)


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
