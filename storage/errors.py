"""Errors of storage. Each is also the stdlib error that it refines.

StorageError
├── BadName       (ValueError)         a run id or path that is not allowed: a user error
├── StoreRefused  (ValueError)         a store that can't hold a run: a user error
├── NotInStore    (FileNotFoundError)  nothing exists at this path
├── StoreDenied   (PermissionError)    access was refused; never means that nothing exists
├── StoreFull     (OSError)            no space left
├── StoreUnreachable (ConnectionError) the store does not answer
├── StreamCorrupt (ValueError)         committed data is not what its writer committed
│   └── PartCorrupt                    a part's file is damaged, but its commit record is sound: it can be set aside
├── PartRemoved   (FileNotFoundError)  `millrace gc` removed this part
├── SchemaUnknown (ValueError)         written by a newer Millrace
└── Fenced        (RuntimeError)       another writer took over: stop for good
"""


class StorageError(Exception):
    """Base of every error of this package."""


class BadName(StorageError, ValueError):
    """A run id or a path inside a store breaks the naming rules; the message names the rule."""


class StoreRefused(StorageError, ValueError):
    """The store can't hold a run: scheme not supported, root not writable, or create is not exclusive."""


class NotInStore(StorageError, FileNotFoundError):
    """Nothing exists at this path; the message names the path and the store's URL."""


class StoreDenied(StorageError, PermissionError):
    """The store refuses access: credentials are missing or wrong, or may not do this; the message names the URL."""


class StoreFull(StorageError, OSError):
    """The store has no space left. Nothing was published under a final name."""


class StoreUnreachable(StorageError, ConnectionError):
    """The store does not answer, or reports an internal error; the message names the URL."""


class StreamCorrupt(StorageError, ValueError):
    """Something committed is damaged, missing or impossible.

    `file` is the path of the damaged file, relative to the store; `record` the sequence number of the commit record
    that names it (None if no record does); `reason` says what was read and what was expected.
    """

    def __init__(self, file: str, reason: str, record: int | None = None) -> None:
        super().__init__(file, reason, record)
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
    """A part's file is damaged or missing, but its commit record is sound, so the loss is known exactly."""


class PartRemoved(StorageError, FileNotFoundError):
    """The rows of this part were removed by `millrace gc`; its commit record stays."""


class SchemaUnknown(StorageError, ValueError):
    """A part has a schema version newer than this code knows; the message names the file and both versions."""


class Fenced(StorageError, RuntimeError):
    """Another writer opened this log with a higher epoch. Nothing was committed; this writer must stop for good."""
