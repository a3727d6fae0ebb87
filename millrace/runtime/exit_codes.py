"""What a stage process's exit code means to its supervisor, and what the supervisor's signals mean to it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.errors import InputError, LedgerMismatch, RolledBack
from millrace.runtime.messages import milestone_line, send
from storage.errors import Fenced, PartRemoved, SchemaUnknown, StoreDenied, StoreFull, StoreRefused, StreamCorrupt

SHOW_STACKS = signal.SIGUSR1
"""Asks a stage that seems to hang to write its threads' stacks to its log. SIGTERM asks it to stop."""
DRAINED = 75
"""Stopped on request (EX_TEMPFAIL)."""
USER_ERROR = 2
"""Only a person can fix it: a wrong setting, a full disk, a damaged stream."""
FENCED = 76
"""Another process has taken over the work: it must not be restarted."""
MISCOUNTED = 70
"""The ledger does not balance: continuing could give wrong results (EX_SOFTWARE)."""
YIELDED = 77
"""The leading host of a trainer over several hosts is away, and this host is free for its job."""
ROLLED_BACK = 78
"""The trainer collapsed, and is to start again from a checkpoint before."""
ERROR_PREFIX = "error: "
"""Begins the last milestone, which says what the error was."""

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
