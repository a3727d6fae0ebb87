"""Folders saved by `save_to_disk` of the library `datasets`: Arrow streams, and a file that lists them.

folder/state.json ─► data-00000-of-00002.arrow, data-00001-of-00002.arrow ─► rows
folder/dataset_dict.json: the folder holds one such folder per split
"""

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa

from millrace.errors import PromptsError
from storage.json_text import parse_json


def saved_records(folder: str, choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]] | None:
    """The columns of each row that `choose` takes of all; None where `folder` is no saved data set.

    `folder` is a path or an fsspec URL. Raises PromptsError for a folder of several splits and a damaged file.
    """
    folder = folder.rstrip("/")
    splits = _json(f"{folder}/dataset_dict.json")
    if splits is not None:
        names = _texts(splits.get("splits", []), f"{folder}/dataset_dict.json")
        raise PromptsError(f"{folder}: holds the splits {', '.join(names)}; expected one of them, {folder}/SPLIT")
    state = _json(f"{folder}/state.json")
    # Another program's state.json may be anything.
    files = None if state is None else state.get("_data_files")
    if files is None:
        return None
    listed = files if isinstance(files, list) else [None]
    found = [one.get("filename") if isinstance(one, dict) else None for one in listed]
    return _rows([f"{folder}/{name}" for name in _texts(found, f"{folder}/state.json")], choose)


def _texts(values: object, path: str) -> list[str]:
    """`values`, a list of text in the file `path`. Raises PromptsError for anything else."""
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise PromptsError(f"{path}: it does not list its files or splits; expected a folder that `datasets` saved")
    return values


def _json(path: str) -> dict[str, Any] | None:
    try:
        with fsspec.open(path, "rb") as file:
            found = parse_json(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"{path}: can't be read ({error}); expected a folder that `datasets` saved") from error
    if not isinstance(found, dict):
        raise PromptsError(f"{path}: it is no JSON object; expected a folder that `datasets` saved")
    return found


def _rows(files: list[str], choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]]:
    for path in files:
        try:
            with fsspec.open(path, "rb") as file, pa.ipc.open_stream(file.read()) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise PromptsError(f"{path}: can't be read as Arrow ({error}); expected what `datasets` saved") from error
        for batch in table.select(choose(table.column_names)).to_batches():
            yield from batch.to_pylist()
