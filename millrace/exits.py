"""What a stage process's exit code means to its supervisor."""

DRAINED = 75
"""Stopped because it was asked to (EX_TEMPFAIL)."""
MISTAKE = 2
"""Met a person's mistake."""
FENCED = 76
"""Another process took its work over: it must not be started again."""
LAST_WORDS = "error: "
"""How the milestone begins that says which mistake, or who took over."""
