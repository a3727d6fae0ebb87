"""The runs in a root folder, or a single run, with an overview of each.

URL ─► has run.json? ─ yes ─► that run
                     └ no ──► its folders, each a run or a future run ─► overview: a few small files per run
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dashboard.read.model import AttemptInfo, OverviewRow, Recent, RunInfo
from dashboard.read.run_reader import MALFORMED_STATUS, RunReader, read_run_info, settings
from millrace.errors import InputError, MillraceError, RunMissing
from millrace.evaluation.results import Result, ResultsReader
from millrace.runs.record import State, of_attempt, read_note, run_state
from millrace.runs.status import STAGES
from storage import layout
from storage.errors import BadName, StorageError
from storage.json_text import parse_as
from storage.progress import read_progress
from storage.stores.base import Store
from storage.stores.factory import open_store

_LIST_SECONDS = 2.0
_OVERVIEW_SECONDS = 1.0
_NOTE_SECONDS = 10.0
_READERS = 8
"""Number of cached readers, which keep their runs' rows in memory."""


class Runs:
    """The runs in the folder `url`, or the run at `url`; thread-safe. `clock` is a monotonic clock in seconds.

    Raises StorageError or InputError for a URL that can't contain runs. An empty or missing folder has no runs.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._root = open_store(url)
        self.url = self._root.url
        folder = self._root.local_path("")
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InputError("is a file", file=self.url, expected="the folder of a run, or a folder of runs")
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._readers: dict[str, RunReader] = {}
        self._rows: list[OverviewRow] = []
        self._listed = self._overviewed = -float("inf")
        self.ids()

    @property
    def is_missing(self) -> bool:
        """Whether the root is a local folder that does not exist."""
        folder = self._root.local_path("")
        return folder is not None and not folder.exists()

    def ids(self, within: float = _LIST_SECONDS) -> list[str]:
        """Returns the sorted run ids, at most `within` seconds old."""
        with self._lock:
            if self._clock() - self._listed >= within:
                self._watched = self._find()
                # A removed run and a later run of the same name are different runs.
                self._readers = {run_id: reader for run_id, reader in self._readers.items() if run_id in self._watched}
                self._listed = self._clock()
            return list(self._watched)

    def reader(self, run_id: str) -> RunReader:
        """Returns the shared reader of a run. Raises KeyError for an id not in `ids()`, and errors of RunReader."""
        self.ids()
        with self._lock:
            watched = self._watched[run_id]
            reader = self._readers.pop(run_id, None) or RunReader(watched.store, self._clock)
            # Reinserted at the end, so that the first is the least recently used.
            self._readers[run_id] = reader
            while len(self._readers) > _READERS:
                self._readers.pop(next(iter(self._readers)))
            return reader

    def overview(self) -> list[OverviewRow]:
        """Returns one row per run in the order of `ids()`, at most a second old."""
        self.ids()
        with self._lock:
            if self._clock() - self._overviewed >= _OVERVIEW_SECONDS:
                self._rows = [watched.row() for watched in self._watched.values()]
                self._overviewed = self._clock()
            return list(self._rows)

    def _find(self) -> dict[str, "_Watched"]:
        if self._root.exists(layout.RUN):
            run_id = _own_id(self._root)
            return {run_id: self._watched.get(run_id) or _Watched(run_id, self._root, self._clock)}
        names = [name for name in self._root.folders() if _is_run_id(name)]
        base = self.url.removesuffix("/")
        return {
            name: self._watched.get(name) or _Watched(name, open_store(f"{base}/{name}"), self._clock) for name in names
        }


class _Watched:
    """Reads the overview row of one run."""

    def __init__(self, run_id: str, store: Store, clock: Callable[[], float]) -> None:
        self.run_id = run_id
        self.store = store
        self._clock = clock
        self._note = ""
        self._note_read = -float("inf")
        self._info: RunInfo | None = None
        self._settings: Mapping[str, str] = {}
        self._stage_status: Mapping[str, Mapping[str, Any]] = {}
        self._results = ResultsReader(store)
        self._evaluated: Sequence[Result] = ()

    def row(self) -> OverviewRow:
        try:
            return self._read_row()
        except RunMissing:
            return OverviewRow(run_id=self.run_id, problem=f"no {layout.RUN} yet: being created, or not a run")
        except (StorageError, MillraceError, OSError) as error:
            return OverviewRow(run_id=self.run_id, problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a run's records hold, the other runs are shown
            return OverviewRow(run_id=self.run_id, problem=f"{MALFORMED_STATUS}: {error!r}")

    def _read_row(self) -> OverviewRow:
        info, previous = read_run_info(self.store, self._info), self._info
        newest = info.attempts[-1]
        # The status records of an ended run do not change, and most runs have ended.
        if not newest.end or info != previous:
            self._stage_status = read_progress(self.store)
            self._evaluated = self._results.read()
        if previous is None or info.config is not previous.config:
            self._settings = settings(info.config)
        self._info = info
        trainer = self._stage_status.get("train-0", {})
        evaluated = self._evaluated[-1] if self._evaluated else None
        attempt_status = of_attempt(newest.number, self._stage_status)
        state, cause = run_state(newest.end, newest.t_started, attempt_status)
        last = max([newest.t_started, *(status["t"] for status in attempt_status.values())])
        values = {
            "run_id": self.run_id,
            "state": state,
            "cause": cause,
            "policy_version": trainer.get("policy_version"),
            "max_steps": info.config["training"]["max_steps"],
            "rewards": [(version, reward) for version, reward in trainer.get("reward_curve", []) if reward is not None],
            "ages": _ages(self._stage_status, time.time()),
            "t_started": info.attempts[0].t_started,
            "wall_seconds": _ran(info.attempts, last, trainer),
            "accuracy": None if evaluated is None else evaluated["accuracy"],
            "accuracy_interval": None if evaluated is None else evaluated.get("accuracy_interval"),
            "accuracy_version": None if evaluated is None else evaluated["policy_version"],
            **Recent.values(info, trainer),
            "idle": idle_shares(attempt_status),
            "settings": self._settings,
            "inputs": newest.inputs,
            "note": self._read_note(),
            "accuracies": [
                (result["policy_version"], result["accuracy"])
                for result in self._evaluated
                if result["accuracy"] is not None
            ],
            "missing": self._missing(state, trainer),
        }
        # Pages format and compare these values, so those of another type are a problem of this run.
        return parse_as(OverviewRow, values, layout.PROGRESS)

    def _read_note(self) -> str:
        if self._clock() - self._note_read >= _NOTE_SECONDS:
            self._note = read_note(self.store)
            self._note_read = self._clock()
        return self._note

    def _missing(self, state: State, trainer: Mapping[str, Any]) -> list[str]:
        sentences = [str(error) for error in self._results.damaged]
        if state != "running" and "policy_version" not in trainer:
            sentences.insert(0, f"{layout.progress('train', 0)} is missing or damaged, which names the version")
        return sentences


def _own_id(store: Store) -> str:
    """Returns the id of the run at a store's root: from its record if readable, otherwise the folder's name."""
    try:
        run_id = read_run_info(store).run_id
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


def _ages(statuses: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, float]:
    oldest: dict[str, float] = {}
    for name, status in statuses.items():
        stage = name.rpartition("-")[0]
        oldest[stage] = min(status["t"], oldest.get(stage, status["t"]))
    return {stage: max(0.0, now - oldest[stage]) for stage in STAGES if stage in oldest}


def _ran(attempts: Sequence[AttemptInfo], last: float, trainer: Mapping[str, Any]) -> float:
    """Returns the seconds in which an attempt ran; `last` is the newest sign of life, unix seconds.

    The end of an attempt that was killed is unknown, but the trainer counts its seconds through all attempts.
    """
    ends = [attempt.end.t if attempt.end else attempt.t_started for attempt in attempts[:-1]] + [last]
    ran = sum(end - attempt.t_started for end, attempt in zip(ends, attempts, strict=True))
    return float(max(ran, sum(trainer.get("seconds", {}).values())))


def idle_shares(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Stage → share of its time without work, without loading."""
    seconds = {stage: [0.0, 0.0] for stage in STAGES}
    for name, status in statuses.items():
        worked: Mapping[str, float] = status.get("seconds", {})
        if (stage := name.rpartition("-")[0]) in seconds:
            seconds[stage][0] += worked.get("idle", 0.0)
            seconds[stage][1] += sum(worked.values()) - worked.get("loading", 0.0)
    return {stage: idle / whole for stage, (idle, whole) in seconds.items() if whole > 0}
