"""Which start model and tokenizer a run began with: a SHA-256 of every file, as sha256sum prints it.

    start model's folder ─► each file of weights, configuration, tokenizer ─► start_hashes.json, once a run

The folder that a config names may hold something else tomorrow, and another host's folder of that name may already.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage import layout
from storage.errors import NotInStore
from storage.store import Store

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""What a Hugging Face folder may hold that changes the policy or its tokens."""


def record_start_hashes(store: Store, folder: Path) -> None:
    """Hashes the start model in `folder` and writes that into the run; what is written there stays.

    Reads every file whole: a second or two for a gigabyte, and nothing where the run has its hashes already.
    """
    if store.exists(layout.START_HASHES):
        return
    names = sorted({file.name for pattern in _PATTERNS for file in folder.glob(pattern)})
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: _sha256(folder / name), names)
        files = dict(zip(names, hashes, strict=True))
    store.put_if_absent(layout.START_HASHES, json.dumps(files, indent=1).encode())


def read_start_hashes(store: Store) -> dict[str, str] | None:
    """SHA-256 by file name, 64 hex digits; None where the run has none: nothing was trained, or it is an older one."""
    try:
        hashes: dict[str, str] = json.loads(bytes(store.get(layout.START_HASHES)))
    except NotInStore:
        return None
    return hashes


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
