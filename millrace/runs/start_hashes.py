"""The start model and tokenizer of a run: a SHA-256 of each file, as sha256sum prints it.

    start model's folder ─► each file of weights, configuration, tokenizer ─► start_hashes.json, once per run

The folder that a config names may change later, and may differ between hosts.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a Hugging Face folder that affect the policy or its tokens."""


def record_start_hashes(store: Store, folder: Path) -> None:
    """Hashes the start model in `folder` and stores the result, unless the run already has one.

    Reads all files, which takes one or two seconds per gigabyte.
    """
    if store.exists(layout.START_HASHES):
        return
    names = sorted({file.name for pattern in _PATTERNS for file in folder.glob(pattern)})
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: _sha256(folder / name), names)
        files = dict(zip(names, hashes, strict=True))
    store.put_if_absent(layout.START_HASHES, json.dumps(files, indent=1).encode())


def read_start_hashes(store: Store) -> dict[str, str] | None:
    """SHA-256 by file name, 64 hex digits; None if nothing was trained yet, and for older runs.

    Raises StreamCorrupt.
    """
    try:
        hashes = parse_json(bytes(store.get(layout.START_HASHES)))
    except NotInStore:
        return None
    except ValueError as error:
        raise StreamCorrupt(layout.START_HASHES, f"not JSON: {error}; restore it from a copy of the run") from error
    if not isinstance(hashes, dict):
        raise StreamCorrupt(layout.START_HASHES, "not a JSON object; restore it from a copy of the run")
    return hashes


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
