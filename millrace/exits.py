"""What a stage process's exit code means to its supervisor."""

DRAINED = 75
"""Stopped because it was asked to (EX_TEMPFAIL)."""
MISTAKE = 2
"""Met a person's mistake."""
MISTAKE_PREFIX = "error: "
"""How the milestone begins that says which."""
