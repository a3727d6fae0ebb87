"""Errors of storage. Each is also the standard error that it refines."""


class StorageError(Exception):
    """Base of every error of this package, printed as "FILE: READ; expected EXPECTED".

    `read`: what is wrong. `file`: the store's URL, the path or the setting where. `expected`: what would be right.
    """

    def __init__(self, read: object, *, file: object = None, expected: str | None = None) -> None:
        super().__init__(read)
        self.read = str(read)
        self.file = None if file is None else str(file)
        self.expected = expected

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}: "
        return f"{place}{self.read}{'' if self.expected is None else f'; expected {self.expected}'}"


class BadName(StorageError, ValueError):
    """A run id or a path inside a store breaks the naming rules."""


class StoreRefused(StorageError, ValueError):
    """The store can't hold a run: scheme not supported, root not writable, or create is not exclusive."""


class NotInStore(StorageError, FileNotFoundError):
    """Nothing exists at this path."""


class StoreDenied(StorageError, PermissionError):
    """The store refuses access, for example to wrong credentials. Never means that nothing exists."""


class StoreFull(StorageError, OSError):
    """The store has no space left. Nothing was published under a final name."""


class StoreUnreachable(StorageError, ConnectionError):
    """The store does not answer, or reports an internal error."""


class StreamCorrupt(StorageError, ValueError):
    """Committed data is damaged, missing or impossible.

    `file` is the path of the damaged file, relative to the store; `record` the sequence number of the commit record
    that names it (None if no record does); `reason` says what was read and what was expected.
    """

    file: str

    def __init__(self, file: str, reason: str, record: int | None = None) -> None:
        super().__init__(reason, file=file)
        self.args = (file, reason, record)
        self.file = file
        self.reason = reason
        self.record = record

    def __str__(self) -> str:
        named_by = "" if self.record is None else f" (named by record {self.record})"
        return f"{self.file}{named_by}: {self.reason}"


def damaged_record(file: str, reason: str) -> StreamCorrupt:
    """Makes the error for a commit record. Only a copy can replace it, because later records depend on it."""
    return StreamCorrupt(file, f"{reason}; restore it from a copy of the run")


class PartCorrupt(StreamCorrupt):
    """A part's file is damaged or missing, but its commit record is sound, so the part can be set aside."""


class PartRemoved(StorageError, FileNotFoundError):
    """The rows of this part were removed by `millrace gc`; its commit record stays."""


class SchemaUnknown(StorageError, ValueError):
    """A part was written by another version of Millrace, with a schema that is not known here."""


class Fenced(StorageError, RuntimeError):
    """Another writer opened this log with a higher epoch. Nothing was committed; this writer must stop for good."""
