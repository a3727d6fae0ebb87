"""Errors that end a stage with one sentence. After all but a rollback a restart would not help."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.errors import InputError, LedgerMismatch, RolledBack
from millrace.runtime.exit_codes import ERROR_PREFIX, FENCED, MISCOUNTED, ROLLED_BACK, USER_ERROR
from millrace.runtime.messages import milestone_line, send
from storage.errors import Fenced, PartRemoved, SchemaUnknown, StoreDenied, StoreFull, StoreRefused, StreamCorrupt

_USER_ERRORS = (InputError, StoreRefused, StoreDenied, StoreFull, StreamCorrupt, SchemaUnknown, PartRemoved)
_EXIT_CODES: dict[type[Exception], int] = {
    **dict.fromkeys(_USER_ERRORS, USER_ERROR),
    Fenced: FENCED,
    LedgerMismatch: MISCOUNTED,
    RolledBack: ROLLED_BACK,
}


@contextmanager
def final_error_reported() -> Iterator[None]:
    """Sends the sentence of an error that has an exit code, and exits with that code."""
    try:
        yield
    except tuple(_EXIT_CODES) as error:
        send(milestone_line(f"{ERROR_PREFIX}{error}"))
        sys.exit(next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)))
