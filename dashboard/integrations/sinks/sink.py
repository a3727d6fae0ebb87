"""The interface of a sink, and the state that a mirror keeps between starts.

points of a run, oldest first ─► sink.write ─► sink.flush ─► MirrorState.save: they are not written again
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import InputError, writing


@dataclass(frozen=True, kw_only=True)
class Point:
    """The metrics of one policy version at one moment."""

    policy_version: int
    incarnation: int
    """Trainer incarnation; -1 for an evaluation."""
    t: float
    """Unix seconds."""
    values: Mapping[str, float]
    """Metric name, such as `train/reward_mean` → value, in the unit that the name ends in."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text at one policy version."""

    policy_version: int
    t: float
    """Unix seconds."""
    name: str
    """Tag, such as `config`."""
    markdown: str


class Sink:
    """Destination of points. `open` is called once, then `write` and `flush` for each batch, then `close`.

    Examples:
        >>> class Printer(Sink):
        ...     def write(self, points, state):
        ...         for point in points:
        ...             print(point.policy_version, dict(point.values))
        >>> point = Point(policy_version=3, incarnation=0, t=0.0, values={"train/loss": 0.5})
        >>> Printer().write([point], MirrorState(t_run=0.0))
        3 {'train/loss': 0.5}
    """

    name: str
    """Description with its location, for the user."""
    state_file: Path
    takes_texts = False

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: "MirrorState") -> None:
        """Prepares to append after `state`; `run` is `run.json`, `config` belongs to the newest attempt.

        Raises InputError for problems that the user has to fix.
        """
        raise NotImplementedError

    def write(self, points: Sequence[Point], state: "MirrorState") -> None:
        """Writes `points` and counts them in `state`. Raises InputError for errors of the destination."""
        raise NotImplementedError

    def write_texts(self, texts: Sequence[Text]) -> None:
        """Writes `texts`; called only if `takes_texts`."""

    def roll_back(self, policy_version: int, state: "MirrorState") -> None:
        """Hides points and texts of `policy_version` and later, which were rolled back and will be repeated.

        Does nothing where the points of the restarted trainer have a higher incarnation instead.
        """

    def flush(self) -> None:
        """Makes written points durable, unless `write` does."""

    def close(self) -> None:
        """Ends writing."""


@dataclass(kw_only=True)
class MirrorState:
    """Progress of copying a run into a sink; saved next to the sink's files."""

    t_run: float
    """Time of the run's first start, unix seconds; distinguishes runs of the same name."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the trainer's metrics, a `LogCursor` as JSON; empty at the start."""
    incarnation: int = 0
    """Newest trainer incarnation with a written point."""
    newest: int = 0
    """Newest trained policy version with a written point; 0, the base model, has none."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """Policy version → time of its written evaluation, unix seconds."""
    opened: int = 0
    """Number of files the sink has created."""
    rows: int = 0
    """Number of points written."""

    flow: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`<stage>-<replica>` → its `FlowState` as JSON."""
    attempts: int = 0
    """Number of attempts whose config was written."""
    sampled: int = 0
    """Newest policy version with written samples."""

    def discard_evaluations(self, policy_version: int) -> None:
        """Marks evaluations of `policy_version` and later as not written."""
        self.evaluations = {v: t for v, t in self.evaluations.items() if int(v) < policy_version}

    def save(self, path: Path) -> None:
        """Replaces the file at `path` atomically. Raises InputError if it can't be written."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_name(f".{path.name}.{os.getpid()}")
            written.write_text(json.dumps(self.__dict__, indent=1))
            written.replace(path)


def read_state(path: Path, run: Mapping[str, Any]) -> MirrorState:
    """Reads the state at `path`, or creates one for the run with this `run.json`.

    Raises InputError for a file that can't be read, is malformed, or belongs to another run of the same name.
    """
    try:
        state = MirrorState(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return MirrorState(t_run=run["t_started"])
    except OSError as error:
        raise InputError(f"can't be read: {error.strerror or error}", file=path) from error
    except (ValueError, TypeError) as error:
        raise InputError(
            "is malformed", file=path, expected="the state of `millrace mirror`: choose another folder, or remove it"
        ) from error
    if state.t_run != run["t_started"]:
        raise InputError(
            f"belongs to another run named {run['run_id']!r}", file=path, expected="another folder, or an empty one"
        )
    return state
