"""What the launcher of each host is told."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one trainer, as one of them sees it."""

    run_url: str
    """Where the run is stored; there the hosts find the leading one."""
    attempt: int
    host: int
    """This one, in [0, hosts); host 0 leads."""
    hosts: int
    min_hosts: int
    """With how many to go on while others are missing, in [1, hosts]."""
    join_seconds: float
    """How long to wait for the missing ones before that."""
    network: str
    """In which they reach each other, such as 10.0.0.0/24."""
    ranks: int
    """Ranks of each host."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
