"""What every sink has in common: the points it takes, and what it remembers from one start to the next.

points of a run, oldest first ─► sink.write ─► sink.flush ─► Memory.save: from here on they are not written again
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from millrace.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured at one policy version at one moment."""

    policy_version: int
    incarnation: int
    """Of the trainer; that of the last step before it, for an evaluation."""
    t: float
    """Unix seconds."""
    values: Mapping[str, float]
    """By name, such as `train/reward_mean`; each in the unit that its name ends in."""


class Sink(Protocol):
    """Where points go."""

    name: str
    """For people: what it is and where it writes."""
    memory: Path
    """Where it is remembered what was written."""

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], memory: "Memory") -> None:
        """Get ready to write behind what `memory` knows of; `run` is `run.json`, `config` the newest attempt's.

        Raises InputError where the person has to put something right.
        """

    def write(self, points: Sequence[Point], memory: "Memory") -> None:
        """Write `points`, and count in `memory` what the sink counts."""

    def roll_back(self, policy_version: int, memory: "Memory") -> None:
        """The points of `policy_version` and later belong to a future that was rolled back; others follow."""

    def flush(self) -> None:
        """What was written is on its way, whatever becomes of this process."""

    def close(self) -> None:
        """Nothing more is written."""


@dataclass(kw_only=True)
class Memory:
    """How far a run was copied into a sink. Saved beside what the sink writes."""

    t_run: float
    """When the run was first started, unix seconds: which run of this name it is."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """The place in the trainer's metrics, a `LogCursor` as JSON; empty at the start."""
    incarnation: int = 0
    """Newest incarnation of the trainer that a point was written of."""
    newest: int = 0
    """Newest policy version in training that a point was written of; 0, the base model, has none."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """By policy version, when the evaluation was made that was written, unix seconds."""
    opened: int = 0
    """How many files the sink has begun."""
    rows: int = 0
    """How many points the sink has taken."""

    def forget_evaluations(self, policy_version: int) -> None:
        """Those of `policy_version` and later are to be written again, where the run still has them."""
        self.evaluations = {v: t for v, t in self.evaluations.items() if int(v) < policy_version}

    def save(self, path: Path) -> None:
        """Replace the file at `path`, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(self.__dict__, indent=1))
        written.replace(path)


def read_memory(path: Path, run: Mapping[str, Any]) -> Memory:
    """What is remembered at `path` of the run whose `run.json` is given; a new memory if nothing is.

    Raises InputError for a file that can't be read, that `Memory.save` did not write, or that is of another run of
    the same name.
    """
    try:
        memory = Memory(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Memory(t_run=run["t_started"])
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not what `millrace mirror` left there: choose another place, or remove it"
        ) from error
    if memory.t_run != run["t_started"]:
        raise InputError(
            f"{path}: another run named {run['run_id']!r} was mirrored here before: choose another place, or remove "
            "what is there"
        )
    return memory
