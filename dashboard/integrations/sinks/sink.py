"""The interface of a sink, and the state that a mirror keeps from one start to the next.

points of a run, oldest first ─► sink.write ─► sink.flush ─► MirrorState.save: they will not be written again
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
    """The metrics of one policy version at one moment."""

    policy_version: int
    incarnation: int
    """Of the trainer; -1 for an evaluation."""
    t: float
    """Unix seconds."""
    values: Mapping[str, float]
    """By name, such as `train/reward_mean`, in the unit that the name ends in."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text at one policy version."""

    policy_version: int
    t: float
    """Unix seconds."""
    name: str
    """Such as `config`."""
    markdown: str


class Sink(Protocol):
    """Where points go."""

    name: str
    """What it is and where it writes, for the user."""
    state_file: Path
    """Where the MirrorState is saved."""
    takes_texts: bool
    """Whether it has a place for texts."""

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: "MirrorState") -> None:
        """Prepare to append to what `state` counts; `run` is `run.json`, `config` that of the newest attempt.

        Raises InputError if the user has to fix something.
        """

    def write(self, points: Sequence[Point], state: "MirrorState") -> None:
        """Write `points` and count them in `state`."""

    def write_texts(self, texts: Sequence[Text]) -> None:
        """Write `texts`; called only if it takes them."""

    def roll_back(self, policy_version: int, state: "MirrorState") -> None:
        """The points and texts of `policy_version` and later were rolled back; others follow."""

    def flush(self) -> None:
        """After this, written points survive the end of this process."""

    def close(self) -> None:
        """No more writes follow."""


@dataclass(kw_only=True)
class MirrorState:
    """How far a run was copied into a sink. Saved beside what the sink writes."""

    t_run: float
    """When the run was first started, unix seconds; identifies the run among others of its name."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the trainer's metrics, a `LogCursor` as JSON; empty at the start."""
    incarnation: int = 0
    """Newest incarnation of the trainer with a written point."""
    newest: int = 0
    """Newest trained policy version with a written point; 0, the base model, has none."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """Policy version → time of the evaluation that was written, unix seconds."""
    opened: int = 0
    """Number of files the sink has created."""
    rows: int = 0
    """Number of points the sink has taken."""

    flow: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`<stage>-<replica>` → how far its time was copied: a `FlowState` as JSON."""
    attempts: int = 0
    """Number of attempts whose config was written."""
    sampled: int = 0
    """Newest policy version of which samples were written."""

    def forget_evaluations(self, policy_version: int) -> None:
        """Those of `policy_version` and later will be written again, if the run still has them."""
        self.evaluations = {v: t for v, t in self.evaluations.items() if int(v) < policy_version}

    def save(self, path: Path) -> None:
        """Replace the file at `path`, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(self.__dict__, indent=1))
        written.replace(path)


def read_state(path: Path, run: Mapping[str, Any]) -> MirrorState:
    """The state at `path` for the run with this `run.json`; a new one if there is no file.

    Raises InputError for a file that can't be read, that `MirrorState.save` did not write, or that is of another run of
    the same name.
    """
    try:
        state = MirrorState(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return MirrorState(t_run=run["t_started"])
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not what `millrace mirror` left there: choose another place, or remove it"
        ) from error
    if state.t_run != run["t_started"]:
        raise InputError(
            f"{path}: another run named {run['run_id']!r} was mirrored here before: choose another place, or remove "
            "what is there"
        )
    return state
