"""The weight files of a model folder, and its files of JSON. Needs no torch."""

import hashlib
from pathlib import Path
from typing import Any

from millrace.errors import ModelFolderError
from storage.json_text import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the only weight file, or of the index of several."""
_LARGEST_JSON = 512 << 20
"""Bytes. The largest tokenizers have some 30 million."""


def require(fine: bool, read: object, expected: str, *, file: Path | None = None, key: str | None = None) -> None:
    """Raises ModelFolderError unless `fine`."""
    if not fine:
        raise ModelFolderError(read, file=file, key=key, expected=expected)


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of the folder. Raises ModelFolderError."""
    expected = "a JSON object"
    require(path.is_file(), "no such file", expected, file=path)
    try:
        size = path.stat().st_size
        values = parse_json(path.read_bytes()) if size <= _LARGEST_JSON else None
    except (OSError, ValueError) as error:
        read = f"can't be read: {error.strerror}" if isinstance(error, OSError) else f"not JSON: {error}"
        raise ModelFolderError(file=path, read=read, expected=expected) from error
    require(size <= _LARGEST_JSON, f"{size:,} bytes", f"at most {_LARGEST_JSON:,}", file=path)
    if not isinstance(values, dict):
        raise ModelFolderError(file=path, read="no JSON object", expected=expected)
    return values


def content_digest(folder: Path) -> str:
    """Return the SHA-256 of the files that affect the model's output, 12 hex digits; reads a gigabyte in a second."""
    digest = hashlib.sha256()
    for file in sorted(file for name in ("*.safetensors", "*.json", "*.jinja") for file in folder.glob(name)):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads the weights from. Raises ModelFolderError for a bad index."""
    return [folder / name for name in sorted(set(read_index(folder).values())) or [WEIGHTS]]


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor; empty if the weights are in one file, which transformers prefers to an index."""
    path = folder / INDEX
    if not path.exists() or (folder / WEIGHTS).is_file():
        return {}
    index = read_object(path)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelFolderError(file=path, key="weight_map", read="no object", expected="tensors and their files")
    is_object = isinstance(index.get("metadata"), dict)
    require(is_object, "no object", "one, which transformers reads", file=path, key="metadata")
    for tensor, file in files.items():
        fine = isinstance(file, str) and file not in ("", ".", "..") and "/" not in file and "\0" not in file
        require(fine, f"{tensor} is in {file!r}", "the name of a file in the same folder", file=path)
    return files
