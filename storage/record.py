"""One commit record: the small JSON object that makes data part of a stream, and its strict reading."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from storage.errors import StreamCorrupt

Kind = Literal["fence", "data", "end", "checkpoint"]

NO_VERSION = -1
"""Stands for "no policy version" where rows have none."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one commit says. Fields that a kind does not have keep their defaults and are not written."""

    seq: int
    """Ordinal of the record in its log, from 0 without gaps."""
    kind: Kind
    """fence: a writer took over; data: a part; end: nothing follows in this epoch; checkpoint: the trainer's."""
    epoch: int
    """Ordinal of the writer that committed it: its fence's, from 0."""
    nonce: str
    """Drawn for this record alone, so that its writer recognises it when the store's reply was lost."""
    writer: str
    """Who the writer says it is, for people."""
    prev: str
    """sha256 (hex) of the previous record's bytes; '' for the first."""

    part: int = 0
    """data: ordinal among the data records of the log, from 0."""
    seg: str = ""
    """data: path of the Arrow file, relative to the stream's folder."""
    bytes: int = 0
    """data: length of the Arrow file."""
    checksum: str = ""
    """data: CRC-32C of the Arrow file, 8 hex digits."""
    rows: int = 0
    """data: number of rows."""
    first_row_id: int = 0
    """data: row_id of the first row; its ordinal in the stream where rows have no row_id."""
    tokens: int = 0
    """data: response tokens that the rows stand for."""
    min_policy_version: int = NO_VERSION
    """data: oldest policy version behind the rows."""
    max_policy_version: int = NO_VERSION
    """data: newest policy version behind the rows."""
    schema_version: int = 0
    """data: version of the schema the Arrow file was written with."""

    body: dict[str, Any] = field(default_factory=dict)
    """checkpoint: free JSON object."""


_COMMON = ("seq", "kind", "epoch", "nonce", "writer", "prev")
_DATA = (
    "part",
    "seg",
    "bytes",
    "checksum",
    "rows",
    "first_row_id",
    "tokens",
    "min_policy_version",
    "max_policy_version",
    "schema_version",
)
_NAMES: dict[str, tuple[str, ...]] = {
    "fence": _COMMON,
    "data": _COMMON + _DATA,
    "end": _COMMON,
    "checkpoint": (*_COMMON, "body"),
}
_TYPES = {name: get_origin(hint) or hint for name, hint in get_type_hints(Record).items()}


def encode(record: Record) -> bytes:
    """The record as a JSON object with sorted keys, holding the fields of its kind.

    Raises ValueError for a number that is not finite and TypeError for a type that JSON does not have.
    """
    values = asdict(record)
    chosen = {name: values[name] for name in _NAMES[record.kind]}
    return json.dumps(chosen, sort_keys=True, allow_nan=False).encode()


def decode(data: bytes, file: str) -> Record:
    """The record in `data`. Raises StreamCorrupt, which names `file`, unless it has exactly the fields of its kind."""
    try:
        values = json.loads(data)
    except ValueError as error:
        raise StreamCorrupt(file, f"the record is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("kind") not in get_args(Kind):
        raise StreamCorrupt(file, f"expected a JSON object whose kind is one of {', '.join(get_args(Kind))}")
    expected = _NAMES[values["kind"]]
    if set(values) != set(expected):
        raise StreamCorrupt(
            file, f"the {values['kind']} record has the fields {sorted(values)}, not {sorted(expected)}"
        )
    for name in expected:
        if name != "kind" and type(values[name]) is not _TYPES[name]:
            raise StreamCorrupt(file, f"{name} is {values[name]!r}, expected {_TYPES[name].__name__}")
    return Record(**values)
