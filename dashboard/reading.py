"""Looks at a run again and again: what became of its trajectories, what its stages measured, how it is doing.

run.json, attempts/ ──────────────► facts                          of each look, only what is new is read
progress/, commit logs ───────────► status, signs of life          ┐
║ consumed ║ ─────────────────────► rows                           ├─► RunData
║ metrics/<stage>-<r> ║ ──────────► tables by name                 ┘
evaluations/ ─────────────────────► accuracy by version
whatever of it can't be read ─────► a sentence; the rest is shown all the same
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dashboard.data import Columns, RunData
from dashboard.facts import read_facts, replicas
from dashboard.streams import ConsumedRows, MetricRows
from millrace.errors import MillraceError
from millrace.status import StatusReader
from storage import layout
from storage.errors import NotInStore, StorageError
from storage.progress import read_progress
from storage.store import Store

_LOOK_SECONDS = 0.3
"""Nobody sees more often than that; pages that are open side by side share a look."""


class RunReader:
    """Reads the run in `store`; thread-safe. `clock` tells seconds that pass.

    Opening raises RunMissing where there is none, StreamCorrupt where its record can't be read, and what a store
    raises that can't be reached.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._facts = read_facts(store)
        self._status: StatusReader | None = None
        self._consumed = ConsumedRows(store)
        self._metrics = {
            f"{stage}-{replica}": MetricRows(store, stage, replica) for stage, replica in replicas(self._facts.config)
        }
        self._evaluations = Evaluations(store)
        self._lives: Mapping[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._last: RunData | None = None
        self._looked = 0.0

    def look(self) -> RunData:
        """The run now, or as it was at most 0.3 seconds ago. What can't be read is named in its `problems`."""
        with self._lock:
            if self._last is None or self._clock() - self._looked >= _LOOK_SECONDS:
                self._last = self._look()
                self._looked = self._clock()
            return self._last

    def _look(self) -> RunData:
        problems: list[str] = []
        t = time.time()
        with _noting(problems):
            self._facts = read_facts(self._store, self._facts)
        with _noting(problems):
            self._lives = read_progress(self._store)
        status: Mapping[str, Any] | None = None
        with _noting(problems):
            status = self._look_at_status()
        streams: list[ConsumedRows | MetricRows] = [self._consumed, *self._metrics.values()]
        for rows in streams:
            with _noting(problems):
                rows.read_new()
            problems += rows.problems
        with _noting(problems):
            self._evaluations.read_new()
        problems += self._evaluations.problems
        return RunData(
            facts=self._facts,
            t=t,
            status=status,
            lives=self._lives,
            consumed=self._consumed.columns,
            outcomes=self._consumed.outcomes,
            metrics={name: rows.columns for name, rows in self._metrics.items()},
            evaluations=self._evaluations.columns,
            problems=tuple(dict.fromkeys(problems)),
        )

    def _look_at_status(self) -> Mapping[str, Any]:
        # Not before: a log that is damaged is a problem of the status alone.
        if self._status is None:
            self._status = StatusReader(self._store)
        return self._status.look()


class Evaluations:
    """Held-out results by policy version, kept up to date."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, float] = {}
        self._results: dict[int, tuple[float, int]] = {}
        self.problems: list[str] = []
        """A sentence for each file that is no evaluation."""

    def read_new(self) -> None:
        """Reads the files that are new, or not what they were."""
        self.problems = []
        for entry in self._store.entries(layout.EVALUATIONS):
            if self._read.get(entry.path) == entry.t_modified:
                continue
            try:
                result = json.loads(bytes(self._store.get(entry.path)))
                self._results[int(result["policy_version"])] = float(result["accuracy"]), int(result["prompts"])
            except NotInStore:
                continue
            except (ValueError, KeyError, TypeError) as error:
                self.problems.append(f"{entry.path}: expected the result of an evaluation: {error!r}")
                continue
            self._read[entry.path] = entry.t_modified

    @property
    def columns(self) -> Columns:
        """policy_version (ascending), accuracy, num_prompts."""
        versions = sorted(self._results)
        results = [self._results[version] for version in versions]
        return {
            "policy_version": np.array(versions, np.int64),
            "accuracy": np.array([accuracy for accuracy, _ in results], np.float64),
            "num_prompts": np.array([num_prompts for _, num_prompts in results], np.int64),
        }


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """What fails within becomes a sentence: the rest of the run is read all the same."""
    try:
        yield
    except (StorageError, MillraceError, OSError) as error:
        problems.append(str(error))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        problems.append(f"what a stage said of itself is not as expected: {error!r}")
