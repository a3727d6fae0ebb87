"""What a stage process's exit code means to its supervisor, and what the supervisor's signals mean to it."""

import signal

SHOW_STACKS = signal.SIGUSR1
"""Asks a stage that seems to hang for the stacks of its threads, which go to its log; SIGTERM asks it to stop."""
DRAINED = 75
"""Stopped because it was asked to (EX_TEMPFAIL)."""
MISTAKE = 2
"""Met what only a person can put right: a mistake of theirs, a full disk, a damaged stream."""
FENCED = 76
"""Another process took its work over: it must not be started again."""
MISCOUNTED = 70
"""The ledger does not balance: whatever goes on from here may be wrong (EX_SOFTWARE)."""
LAST_WORDS = "error: "
"""How the milestone begins that says which mistake, or who took over."""
