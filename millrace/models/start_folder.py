"""Where the base model's Hugging Face folder is: configured, or made by bootstrap and kept in the run."""

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.errors import ModelFolderError
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file, put_file


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, FileRef]


def start_folder(store: Store, path: str | None, cache: Path) -> Path:
    """The folder of the base model: the configured one, or the one that bootstrap put into the run.

    For a run in an object store, its files are copied into the folder `cache` once. Raises ModelFolderError if the run
    has none yet, and StreamCorrupt if one of its files is damaged.
    """
    if path is not None:
        return Path(path).expanduser()
    try:
        refs = parse_manifest(bytes(store.get(layout.START_MANIFEST)))
    except NotInStore as error:
        raise ModelFolderError("the run has no start model yet", file=store.url) from error
    try:
        files = {name: get_file(store, ref) for name, ref in refs.items()}
    except StreamCorrupt as error:
        raise StreamCorrupt(error.file, f"{error.reason}; {RESTORE}") from error
    return store.local_path(layout.START_MODEL) or _copied(files, cache / layout.START_MODEL)


def parse_manifest(data: bytes) -> dict[str, FileRef]:
    """The files of the start model by name, from its manifest's content. Raises StreamCorrupt."""
    return parse_as(_Manifest, data, layout.START_MANIFEST).files


def store_start_model(store: Store, folder: Path) -> None:
    """Puts the files of `folder` into the run as its start model. The manifest, written last, makes it whole.

    Raises StreamCorrupt if a folder or the like has the manifest's name.
    """
    store.delete_tree(layout.START_MODEL)
    files = {
        file.name: asdict(put_file(store, f"{layout.START_MODEL}/{file.name}", file.read_bytes()))
        for file in sorted(folder.iterdir())
    }
    store.put_if_absent(layout.START_MANIFEST, json.dumps({"files": files}, indent=1).encode())
    if not store.exists(layout.START_MANIFEST):
        raise StreamCorrupt(layout.START_MANIFEST, "something else has its name; remove it and resume the run")


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
