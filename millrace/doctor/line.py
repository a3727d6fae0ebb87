"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "wrong", "absent"]
"""`absent`: not there, and nothing is wrong with that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Something about this machine, and what to do about it."""

    group: str
    """Heading: `host`, `packages`, `storage`, `network` or `GPUs`."""
    what: str
    """What was looked at."""
    found: str
    """What it is."""
    state: State
    needed: bool = False
    """Whether a campaign on CPUs can't do without."""
    remedy: str = ""
    """What to do about it, in one sentence; empty if it is fine."""

    @property
    def stops_campaigns(self) -> bool:
        """Whether a campaign on CPUs fails because of this."""
        return self.needed and self.state != "ok"
