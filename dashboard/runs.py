"""The runs below a root, or one run: which there are, and how each of them is doing.

URL ─► run.json there? ─ yes ─► that run
                       └ no ──► its folders, each a run or about to be one ─► overview: three small files a run
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dashboard.data import RunFacts
from dashboard.facts import read_facts
from dashboard.reading import RunReader
from millrace.errors import InputError, MillraceError, RunMissing
from millrace.ledger import Account
from millrace.status import STAGES, run_state, staleness_trained
from storage import layout
from storage.errors import BadName, StorageError
from storage.factory import open_store
from storage.progress import read_progress
from storage.store import Store

_LIST_SECONDS = 2.0
_OVERVIEW_SECONDS = 1.0
_READERS = 8
"""Runs whose rows are kept in memory, those looked at last."""


@dataclass(frozen=True, kw_only=True)
class OverviewRow:
    """One run among others. What is not known is None; nothing is where there is a `problem`."""

    run_id: str
    problem: str | None = None
    """One sentence, where the run can't be read: it is just being created, or damaged."""
    state: str | None = None
    """running, finished or stopped."""
    policy_version: int | None = None
    """The trainer's."""
    max_steps: int | None = None
    """The policy version with which the run is complete."""
    reward_mean: float | None = None
    """Of the last step."""
    staleness_mean: float | None = None
    """Of all trained rollouts, policy versions."""
    staleness_max: int | None = None
    """Of all trained rollouts, policy versions."""
    max_staleness: int | None = None
    """The bound in force, policy versions."""
    ages: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the last sign of life, by stage; of several replicas, of the one that has been silent longest."""


def is_run(store: Store) -> bool:
    """Whether there is a run at the store's root."""
    return store.exists(layout.RUN)


class Runs:
    """The runs below `url`, or the one there; thread-safe. `clock` tells seconds that pass.

    Raises one sentence for a URL at which there can be none: StoreRefused, StoreDenied, StoreUnreachable or another
    StorageError, and InputError. A folder that is empty, or not there yet, is an empty root.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._root = open_store(url)
        self.url = self._root.url
        """Where is looked."""
        folder = self._root.local_path("")
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InputError(f"{self.url}: a file; expected the folder of a run, or one that holds runs")
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._readers: dict[str, RunReader] = {}
        self._rows: list[OverviewRow] = []
        self._listed = self._overviewed = -float("inf")
        self.ids()

    def ids(self, within: float = _LIST_SECONDS) -> list[str]:
        """The run ids, sorted; as they were at most `within` seconds ago."""
        with self._lock:
            if self._clock() - self._listed >= within:
                self._watched = self._find()
                # Should one come back under its old name, it is another run.
                self._readers = {run_id: reader for run_id, reader in self._readers.items() if run_id in self._watched}
                self._listed = self._clock()
            return list(self._watched)

    def reader(self, run_id: str) -> RunReader:
        """The one reader of a run. Raises KeyError for an id that is not among `ids()`, and what opening one raises."""
        self.ids()
        with self._lock:
            watched = self._watched[run_id]
            reader = self._readers.pop(run_id, None) or RunReader(watched.store, self._clock)
            # The one used last comes last, so the first has waited longest.
            self._readers[run_id] = reader
            while len(self._readers) > _READERS:
                self._readers.pop(next(iter(self._readers)))
            return reader

    def overview(self) -> list[OverviewRow]:
        """A row a run, in the order of `ids()`; as it was at most a second ago."""
        self.ids()
        with self._lock:
            if self._clock() - self._overviewed >= _OVERVIEW_SECONDS:
                self._rows = [watched.row() for watched in self._watched.values()]
                self._overviewed = self._clock()
            return list(self._rows)

    def _find(self) -> dict[str, "_Watched"]:
        if is_run(self._root):
            ids = [_own_id(self._root)]
            return {run_id: self._watched.get(run_id) or _Watched(run_id, self._root) for run_id in ids}
        names = [name for name in self._root.folders() if _is_run_id(name)]
        return {name: self._watched.get(name) or _Watched(name, open_store(_join(self.url, name))) for name in names}


class _Watched:
    """One run among others, looked at from outside."""

    def __init__(self, run_id: str, store: Store) -> None:
        self.run_id = run_id
        self.store = store
        self._facts: RunFacts | None = None
        self._lives: Mapping[str, Mapping[str, Any]] = {}

    def row(self) -> OverviewRow:
        """How it is doing now."""
        try:
            return self._known_row()
        except RunMissing:
            return OverviewRow(run_id=self.run_id, problem=f"no {layout.RUN} yet: being created, or no run")
        except (StorageError, MillraceError, OSError) as error:
            return OverviewRow(run_id=self.run_id, problem=str(error))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"what a stage said of itself is not as expected: {error!r}"
            return OverviewRow(run_id=self.run_id, problem=problem)

    def _known_row(self) -> OverviewRow:
        facts, before = read_facts(self.store, self._facts), self._facts
        ended = facts.attempts[-1].ended
        # What has ended gives no more signs of life: of many runs below a root, most have.
        if not ended or facts != before:
            self._lives = read_progress(self.store)
        self._facts = facts
        trainer = self._lives.get("train-0", {})
        account = Account.from_json(trainer["account"]) if "account" in trainer else Account()
        staleness = staleness_trained(account)
        return OverviewRow(
            run_id=self.run_id,
            state=run_state(ended, facts.attempts[-1].t_started, self._lives),
            policy_version=trainer.get("policy_version"),
            max_steps=facts.config["training"]["max_steps"],
            reward_mean=trainer.get("reward_mean"),
            staleness_mean=staleness["mean"],
            staleness_max=staleness["max"],
            max_staleness=facts.max_staleness,
            ages=_ages(self._lives, time.time()),
        )


def _own_id(store: Store) -> str:
    """What the one run is called: by its record, or where that can't be read, by its folder."""
    try:
        run_id = read_facts(store).run_id
    except (StorageError, MillraceError):
        run_id = ""
    name = store.url.rstrip("/").rpartition("/")[2]
    return next((candidate for candidate in (run_id, name) if _is_run_id(candidate)), "run")


def _is_run_id(name: str) -> bool:
    try:
        layout.validate_run_id(name)
    except BadName:
        return False
    return True


def _join(url: str, name: str) -> str:
    return url + name if url.endswith("/") else f"{url}/{name}"


def _ages(lives: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, float]:
    last_signs = {
        stage: min((life["t"] for name, life in lives.items() if name.rpartition("-")[0] == stage), default=None)
        for stage in STAGES
    }
    return {stage: max(0.0, now - t) for stage, t in last_signs.items() if t is not None}
