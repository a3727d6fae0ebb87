"""One commit record: the small JSON object that makes data part of a stream, and its strict reading.

Records are sealed: each contains its own checksum, so any damage is found. A sealed record with fields unknown here was
written by another version of Millrace. That is SchemaUnknown, which is not damage.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from storage.errors import SchemaUnknown, damaged_record
from storage.schema import SCHEMA_VERSION
from storage.streams.sealed import seal, unseal

Kind = Literal["fence", "data", "end", "checkpoint"]

NO_VERSION = -1
"""Stands for "no policy version" where rows have none."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One commit. Fields that its kind does not have keep their defaults and are not written."""

    seq: int
    """Ordinal of the record in its log, from 0 without gaps."""
    kind: Kind
    """fence: a writer took over; data: a part; end: nothing follows in this epoch; checkpoint: the trainer's."""
    epoch: int
    """Ordinal of the writer that committed it: its fence's, from 0."""
    nonce: str
    """Drawn for this record alone, so that its writer recognises it when the store's reply was lost."""
    writer: str
    """Name of the writer, for people."""
    prev: str
    """sha256 (hex) of the previous record's bytes; '' for the first."""

    part: int = 0
    """data: ordinal among the data records of the log, from 0."""
    file: str = ""
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
    incarnation: int = -1
    """data: incarnation of the trainer that made the weights behind the rows; -1 where there is none or several."""
    group_ids: list[int] = field(default_factory=list)
    """data: the groups in the rows, in their order; empty where rows have no group."""
    last_group_id: int = -1
    """data: the highest group in the stream up to here that counts; -1 where rows have no group."""
    missing_groups: list[int] = field(default_factory=list)
    """data: the writer's groups before `last_group_id` that are not in the stream yet, ascending."""
    group_size: int = 0
    """data: promise that every group in the rows is complete and has that many rows; 0: no promise."""
    vocab_size: int = 0
    """data: promise that every token id is in [0, vocab_size); 0: no promise."""

    body: dict[str, Any] = field(default_factory=dict)
    """checkpoint: free JSON object."""


_COMMON = ("seq", "kind", "epoch", "nonce", "writer", "prev")
_DATA = (
    "part", "file", "bytes", "checksum", "rows", "first_row_id", "tokens", "min_policy_version", "max_policy_version",
    "schema_version", "incarnation", "group_ids", "last_group_id", "missing_groups", "group_size", "vocab_size",
)  # fmt: skip
_NAMES: dict[str, frozenset[str]] = {
    "fence": frozenset(_COMMON),
    "data": frozenset(_COMMON + _DATA),
    "end": frozenset(_COMMON),
    "checkpoint": frozenset((*_COMMON, "body")),
}
_TYPES = {name: get_origin(hint) or hint for name, hint in get_type_hints(Record).items()}


def encode(record: Record) -> bytes:
    """The record as a sealed JSON object (see `storage.streams.sealed`) that holds the fields of its kind.

    Raises ValueError for a number that is not finite and TypeError for a type that JSON does not have.
    """
    return seal({name: getattr(record, name) for name in _NAMES[record.kind]})


def decode(data: bytes, file: str) -> Record:
    """The record in `data`, which lies in `file`; both errors name it.

    Raises StreamCorrupt unless it fits its checksum and has exactly the fields of its kind, and SchemaUnknown if it
    is sound, but has fields or a kind that are not known here.
    """
    try:
        values = unseal(data)
    except ValueError as error:
        raise damaged_record(file, f"the record is {error}") from error
    kind = values.get("kind")
    names = _NAMES.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    if unknown := sorted(values.keys() - names):
        what = f"fields {unknown}" if names else f"kind {kind!r}"
        raise SchemaUnknown(
            f"written by another version of Millrace: {what} not known here (schema {SCHEMA_VERSION})", file=file
        )
    if not names:
        raise damaged_record(file, f"expected a JSON object whose kind is one of {', '.join(get_args(Kind))}")
    if values.keys() != names:
        raise damaged_record(file, f"the {kind} record has the fields {sorted(values)}, not {sorted(names)}")
    for name, value in values.items():
        expected = _TYPES[name]
        if type(value) is not expected and name != "kind":
            raise damaged_record(file, f"{name} is {value!r}, expected {expected.__name__}")
        if expected is list and not all(type(item) is int for item in value):
            raise damaged_record(file, f"{name} is {value!r}, expected a list of int")
        if expected is int and not -1 <= value < 2**63:
            raise damaged_record(file, f"{name} is {value}, expected at least -1 and less than 2**63")
    return Record(**values)
