"""Reads a run incrementally.

run.json, attempts/ ──────────────► run info              ┐
progress/, commit logs ───────────► status                │
║ consumed ║ ─────────────────────► newest rows; all      ├─► RunData
║ metrics/<stage>-<r> ║ ──────────► tables by name        │
evaluations/ ─────────────────────► accuracy by version   │
read errors ──────────────────────► sentences             ┘
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from configs.stored import AnnotatorPools
from dashboard.read.groups import GroupReader
from dashboard.read.model import AttemptInfo, Columns, Consumed, RunData, RunInfo
from dashboard.read.streams import ConsumedRows, MetricRows
from dashboard.read.tokens import TokenTexts, read_tokens
from millrace.errors import MillraceError
from millrace.evaluation.promotion import read_decision
from millrace.evaluation.results import HELD_OUT, Result, ResultsReader, measures_by_set
from millrace.runs.record import read_attempt, read_end, read_run
from millrace.runs.status import StatusReader
from millrace.runtime.metrics import RECENT_STEPS
from storage import layout
from storage.errors import NotInStore, StorageError, StreamCorrupt
from storage.progress import read_progress
from storage.stores.base import Store

MALFORMED_STATUS = "a stage's status record is malformed"
_LOOK_SECONDS = 0.3
"""Pages that are open at the same time share data read within this time."""


class RunReader:
    """Reads the run in `store`; thread-safe. `clock` is a monotonic clock in seconds.

    The constructor raises RunMissing if the run does not exist, StreamCorrupt if its record can't be read, and the
    errors of an unreachable store.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._info = read_run_info(store)
        self._status: StatusReader | None = None
        self._recent = ConsumedRows(store, newest=RECENT_STEPS)
        self._consumed: ConsumedRows | None = None
        """All rows, once a page has asked for them."""
        self._metrics = {
            f"{stage}-{replica}": MetricRows(store, stage, replica) for stage, replica in replicas(self._info.config)
        }
        self._evaluations = ResultsReader(store)
        self._results: Sequence[Result] = ()
        self._stage_status: Mapping[str, Mapping[str, Any]] = {}
        self._groups: GroupReader | None = None
        self._texts: TokenTexts | None = None
        self._lock = threading.Lock()
        self._last: RunData | None = None
        self._looked = 0.0

    def look(self) -> RunData:
        """Returns the run as of now, or at most 0.3 seconds ago. `problems` contains read errors."""
        with self._lock:
            if self._last is None or self._clock() - self._looked >= _LOOK_SECONDS:
                self._last = self._look()
                self._looked = self._clock()
            return self._last

    def groups(self) -> tuple[GroupReader, TokenTexts]:
        """Returns the readers of the run's groups and tokens. Raises KeyError or TypeError for a malformed config."""
        with self._lock:
            config = self._info.config
            self._groups = self._groups or GroupReader(self._store, config)
            # The tokenizer of a run that makes its start model is stored after the warm start.
            if self._texts is None or self._texts.note:
                self._texts = read_tokens(self._store, config)
            return self._groups, self._texts

    def _look(self) -> RunData:
        problems: list[str] = []
        t = time.time()
        with _collecting(problems):
            self._info = read_run_info(self._store, self._info)
        with _collecting(problems):
            self._stage_status = read_progress(self._store)
        status: Mapping[str, Any] | None = None
        with _collecting(problems):
            # Not created in the constructor, because a damaged log affects only the status.
            self._status = self._status or StatusReader(self._store)
            # The pages show the metrics of sync_weights themselves.
            status = self._status.look(weight_sync=False)
        streams: list[ConsumedRows | MetricRows] = [self._recent, *self._metrics.values()]
        if self._consumed is not None:
            streams.append(self._consumed)
        for rows in streams:
            with _collecting(problems):
                rows.read_new()
            problems += rows.tail.problems
        problems += self._lost_status()
        with _collecting(problems):
            self._results = self._evaluations.read()
            problems += map(str, self._evaluations.damaged)
        by_set = _by_set(self._results)
        return RunData(
            info=self._info,
            t=t,
            status=status,
            stage_status=self._stage_status,
            recent=self._recent.consumed,
            read_consumed=self._read_consumed,
            metrics={name: rows.columns for name, rows in self._metrics.items()},
            evaluations=by_set.pop(HELD_OUT, _columns([])),
            evaluation_sets=by_set,
            problems=tuple(dict.fromkeys(problems)),
        )

    def _read_consumed(self) -> Consumed:
        with self._lock:
            self._consumed = self._consumed or ConsumedRows(self._store)
            # The next look finds the same problems, and reports them.
            with _collecting([]):
                self._consumed.read_new()
            return self._consumed.consumed

    def _lost_status(self) -> list[str]:
        """Returns missing status records of replicas with metrics; a replica writes its status record first."""
        lost = [name for name, rows in self._metrics.items() if rows.columns and name not in self._stage_status]
        return [
            f"{layout.PROGRESS}/{name}.json is missing or damaged: the activity of {name} is unknown" for name in lost
        ]


def read_run_info(store: Store, previous: RunInfo | None = None) -> RunInfo:
    """Reads a run's info. With `previous`, the result of an earlier call, reads only data that may have changed.

    Raises RunMissing if the run does not exist, and StreamCorrupt for a malformed record.
    """
    run_id = str(read_run(store)["run_id"]) if previous is None else previous.run_id
    attempts = [] if previous is None else list(previous.attempts)
    while (attempt := _attempt(store, len(attempts))) is not None:
        attempts.append(attempt)
    attempts = [attempt if attempt.end else _with_end(store, attempt) for attempt in attempts]
    return RunInfo(run_id=run_id, url=store.url, attempts=tuple(attempts))


def replicas(config: Any) -> Sequence[tuple[str, int]]:
    """Returns the (stage, replica) pairs that write metrics."""
    pools = AnnotatorPools.of(config)
    return [
        *(("generate", replica) for replica in range(config["generation"]["replicas"])),
        *(("score", replica) for replica in range(pools.total("scores"))),
        *(("teach", replica) for replica in range(pools.total("teachers"))),
        ("train", 0),
        ("sync_weights", 0),
    ]


def _with_end(store: Store, attempt: AttemptInfo) -> AttemptInfo:
    # The promotion gate decides before the end is recorded.
    if (end := read_end(store, attempt.number)) is None:
        return attempt
    return replace(attempt, end=end, promotion=read_decision(store, attempt.number))


def _attempt(store: Store, number: int) -> AttemptInfo | None:
    """Reads attempt `number`; None if it does not exist yet. Checks the config that every page needs."""
    try:
        attempt = AttemptInfo(**vars(read_attempt(store, number)))
        _ = attempt.mode, attempt.transport, attempt.max_staleness
        return attempt
    except NotInStore:
        return None
    except StreamCorrupt:
        raise
    except (KeyError, TypeError, ValueError) as error:
        path = layout.attempt(number) if number else layout.RUN
        raise StreamCorrupt(path, f"expected the record of an attempt: {error!r}") from error


def settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Returns a stored config as text by dotted key; strings are unchanged, other values are JSON."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            texts |= settings(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            # Avoids 3.0000000000000004e-05, but keeps differences in the tenth digit.
            texts[prefix + name] = f"{value:.10g}"
        else:
            texts[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return texts


def _by_set(results: Sequence[Result]) -> dict[str, Columns]:
    """Name of a scored evaluation set → its columns; `results` are by ascending version."""
    by_set: dict[str, list[tuple[Result, Result]]] = {}
    for result in results:
        for name, measures in measures_by_set(result).items():
            if measures["accuracy"] is not None:
                by_set.setdefault(name, []).append((result, measures))
    return {name: _columns(some) for name, some in by_set.items()}


def _columns(some: Sequence[tuple[Result, Result]]) -> Columns:
    """Makes columns like `RunData.evaluations` from (result, measures on one set)."""
    intervals = [measures.get("accuracy_interval") or (None, None) for _, measures in some]
    return {
        "policy_version": np.array([result["policy_version"] for result, _ in some], np.int64),
        "accuracy": np.array([measures["accuracy"] for _, measures in some], np.float64),
        # None becomes NaN.
        "accuracy_low": np.array([low for low, _ in intervals], np.float64),
        "accuracy_high": np.array([high for _, high in intervals], np.float64),
        "num_prompts": np.array([measures["prompts"] for _, measures in some], np.int64),
        "t": np.array([result["t"] for result, _ in some], np.float64),
        "seconds": np.array([_seconds(result) for result, _ in some], np.float64),
    }


def _seconds(result: Result) -> float:
    """Returns the duration of the evaluation; NaN if its result does not contain it."""
    seconds = result.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else float("nan")


@contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Adds an error of the block to `problems`, so that the rest of the run is still read."""
    try:
        yield
    except (StorageError, MillraceError, OSError) as error:
        problems.append(str(error))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        problems.append(f"{MALFORMED_STATUS}: {error!r}")
