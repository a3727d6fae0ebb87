"""Tables of the library `datasets`, and folders that its `save_to_disk` wrote: Arrow streams, and a list of them.

folder/state.json ─► data-00000-of-00002.arrow, data-00001-of-00002.arrow ─► rows
folder/dataset_dict.json: the folder holds one such folder per split
"""

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import PromptsError
from storage.json_text import parse_json


def saved_records(folder: str, choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]] | None:
    """The columns of each row that `choose` takes of all; None where `folder` is not a saved data set.

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
    parts = [file.get("filename") if isinstance(file, dict) else None for file in listed]
    return _rows([f"{folder}/{name}" for name in _texts(parts, f"{folder}/state.json")], choose)


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: class labels as their names, floating-point values as text, None if not finite."""
    labels = _labels(table.schema)
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            column = table.column(index)
            text = pc.if_else(pc.is_finite(column), column, None).cast(pa.string())
            table = table.set_column(index, field.name, text)
    for row in (row for batch in table.to_batches() for row in batch.to_pylist()):
        for key, names in labels.items():
            number = row[key]
            row[key] = names[number] if number in range(len(names)) else None
        yield row


def _labels(schema: pa.Schema) -> dict[str, list[str]]:
    """The names of the classes in each column of ClassLabel, by column."""
    try:
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: feature["names"]
            for name, feature in features.items()
            if name in schema.names and isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    # Another program may write anything there.
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _texts(values: object, path: str) -> list[str]:
    """`values`, a list of text in the file `path`. Raises PromptsError for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise PromptsError(f"{path}: it does not list its files or splits; expected a folder that `datasets` saved")
    return values


def _json(path: str) -> dict[str, Any] | None:
    try:
        with fsspec.open(path, "rb") as file:
            values = parse_json(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"{path}: can't be read ({error}); expected a folder that `datasets` saved") from error
    if not isinstance(values, dict):
        raise PromptsError(f"{path}: it is not a JSON object; expected a folder that `datasets` saved")
    return values


def _rows(files: list[str], choose: Callable[[list[str]], list[str]]) -> Iterator[dict[str, Any]]:
    for path in files:
        try:
            with fsspec.open(path, "rb") as file, pa.ipc.open_stream(file.read()) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise PromptsError(f"{path}: can't be read as Arrow ({error}); expected what `datasets` saved") from error
        yield from rows_of(table.select(choose(table.column_names)))
