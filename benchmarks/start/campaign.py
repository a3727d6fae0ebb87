"""One campaign of the tiny preset until it trains, and the moments it passed on the way.

    millrace run ─► first line ─► private server listens ─► flow begins ─► start evaluation ─► stages ─► first step
         └── sampled: every process, its start and its processor time ──┘        memory, SIGTERM ◄── five steps ◄┘

Nothing in the campaign is changed for this. The moments come from its output, its records, its streams, and the kernel.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc

from benchmarks.start.processes import ProcessTree, Sampled
from millrace.runs.record import read_attempt
from millrace.runs.status import STAGES
from storage import layout
from storage.progress import read_progress, read_status
from storage.schema import CONSUMED, TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

CONTROLLER, SERVER, FORK_SERVER, EVALUATE = "controller", "private server", "fork server", "evaluate-0"
PRESET = Path("configs/presets/tiny-cpu.yaml")

_STEPS = 5
"""Memory is measured after this many steps: by then every stage has done all of its work once."""
_LOOK_SECONDS = 0.1
_LISTEN_SECONDS = 0.02
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that a process reached."""

    process: str
    what: str
    seconds: float
    """Since `millrace run` was called."""
    since_last: float
    """Seconds since the process's previous moment; since its own start for the first."""
    cpu_seconds: float
    """Processor time that the process used in between."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What was measured of one campaign."""

    moments: list[Moment]
    cpu_seconds: dict[str, float]
    """Of each process, until the first optimizer step."""
    pss_bytes: dict[str, int]
    """Proportional set size of each process while all of them work."""


def run_campaign(root: Path, run_id: str, settings: list[str], prefect_home: Path) -> Campaign:
    """Runs it in the folder `root` until it has made a few steps. Raises RuntimeError with its output if it ends."""
    sets = [part for setting in (f"storage.root={root}", *settings) for part in ("--set", setting)]
    called = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "run", str(PRESET), "--run-id", run_id, *sets],
        env={**_without_prefect(os.environ), "PREFECT_HOME": str(prefect_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = _Output(process)
    listening = _Listening(process.pid)
    try:
        with ProcessTree(process.pid) as tree:
            _wait_for_steps(process, root / run_id, output)
            pss = tree.pss_bytes()
    finally:
        listening.over.set()
        process.send_signal(signal.SIGTERM)
        process.wait()
    store = open_store(str(root / run_id))
    names = _names(tree.found, process.pid, _stage_records(store))
    reached = _reached(store, names, called=called, first_line=output.first_line, listening=listening.since)
    first_step = reached["train-0"]["first step done"]
    return Campaign(
        moments=list(_moments(reached, names, called)),
        cpu_seconds=_summed(names, {pid: sampled.cpu_until(first_step) for pid, sampled in tree.found.items()}),
        pss_bytes=_summed(names, pss),
    )


class _Output:
    """Reads what the campaign prints, so that it is never blocked; `first_line` is when the first line came."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.first_line = 0.0
        self.lines: list[str] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.first_line = self.first_line or time.time()
            self.lines.append(line)


class _Listening:
    """Watches for the private server's socket; `since` is when it listened."""

    def __init__(self, pid: int) -> None:
        self.since: float | None = None
        self.over = threading.Event()
        self._controller = psutil.Process(pid)
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while self.since is None and not self.over.wait(_LISTEN_SECONDS):
            for child in self._children():
                if any(one.status == psutil.CONN_LISTEN for one in child.net_connections("tcp")):
                    self.since = time.time()

    def _children(self) -> Iterator[psutil.Process]:
        for child in self._controller.children():
            if _is_server(child.cmdline()):
                yield child


def _is_server(command: list[str]) -> bool:
    return "flows.deployment.server" in command


def _without_prefect(environment: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the person's own Prefect changes what is measured."""
    return {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}


def _wait_for_steps(process: subprocess.Popen[str], run: Path, output: _Output) -> None:
    store, ends = open_store(str(run)), time.monotonic() + _LONGEST_SECONDS
    while read_status(store, "train", 0).get("policy_version", 0) < _STEPS:
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"the campaign does not train:\n{''.join(output.lines[-20:])}")
        time.sleep(_LOOK_SECONDS)


def _stage_records(store: Store) -> dict[str, dict[str, Any]]:
    """The status records of the stages, without the controller's heartbeats."""
    return {name: record for name, record in read_progress(store).items() if "pid" in record}


def _names(found: dict[int, Sampled], controller: int, records: dict[str, dict[str, Any]]) -> dict[str, list[Sampled]]:
    """The processes by name, in the order of their start: stages by their status records, others by their module."""
    stages = {record["pid"]: name for name, record in records.items()}
    names: dict[str, list[Sampled]] = {}
    for sampled in sorted(found.values(), key=lambda sampled: sampled.started):
        if sampled.pid == controller:
            name = CONTROLLER
        elif sampled.pid in stages:
            name = stages[sampled.pid]
        elif _is_server(sampled.command):
            name = SERVER
        elif "millrace.runtime.fork_server" in sampled.command:
            name = FORK_SERVER
        else:
            name = _module(sampled.command)
        names.setdefault(name, []).append(sampled)
    return names


def _module(command: list[str]) -> str:
    """`python -m MODULE …` by its module, anything else by its program; a process that ended at once has neither."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return Path(command[0]).name if command else "others"


def _summed(names: dict[str, list[Sampled]], values: Mapping[int, Any]) -> dict[str, Any]:
    """The values of processes, by process id, summed by name."""
    return {name: sum(values.get(one.pid, 0) for one in processes) for name, processes in names.items()}


def _reached(
    store: Store,
    names: dict[str, list[Sampled]],
    *,
    called: float,
    first_line: float,
    listening: float | None,
) -> dict[str, dict[str, float]]:
    """When each process reached what, unix seconds."""
    records = _stage_records(store)
    reached: dict[str, dict[str, float]] = {name: {"starts": ones[0].started} for name, ones in names.items()}
    reached[CONTROLLER] = {
        "starts": called,
        "prints its first line": first_line,
        "flow begins": read_attempt(store, 0).t_started,
        "start evaluation starts": names[EVALUATE][0].started,
        "last stage starts": max(names[f"{stage}-0"][0].started for stage in STAGES),
    }
    if SERVER in names:
        reached[CONTROLLER]["private server starts"] = names[SERVER][0].started
    if listening is not None:
        reached[SERVER]["listens"] = reached[CONTROLLER]["private server listens"] = listening
    for name, record in records.items():
        reached[name]["imported, config read"] = record["t_main"]
        if record["load_seconds"]:
            reached[name]["loaded"] = record["t_main"] + record["load_seconds"]
        if record["t_ready"]:
            reached[name]["ready"] = record["t_ready"]
    reached[EVALUATE]["ends"] = names[EVALUATE][0].last_seen
    for process, moments in _first_step(store).items():
        reached[process] |= moments
    return reached


def _first_step(store: Store) -> dict[str, dict[str, float]]:
    """When the trajectories of the first optimizer step were made, scored and trained, unix seconds."""
    consumed = StreamReader(store, layout.CONSUMED, CONSUMED).next()
    assert consumed is not None
    first = consumed.table.filter(pc.equal(consumed.table["policy_version"], 1))
    last_row: int = pc.max(first["trajectory_row_id"]).as_py()
    reader = StreamReader(store, layout.trajectories(0), TRAJECTORY)
    begun, sampled, part = float("inf"), 0.0, reader.next()
    while part is not None:
        begun = min(begun, pc.min(part.table["t_started"]).as_py())
        sampled = max(sampled, pc.max(part.table["t_finished"]).as_py())
        if part.record.first_row_id + part.record.rows > last_row:
            break
        part = reader.next()
    assert part is not None
    reward = read_attempt(store, 0).config["scoring"]["reward"]
    # The scores have the same parts, in a log that begins with a fence.
    scored = store.local_path(f"{layout.scores(reward, 0, 0, 1)}/{layout.record(part.record.part + 1)}")
    assert scored is not None
    t_scored, t_trained = scored.stat().st_mtime, first["t"][0].as_py()
    return {
        "generate-0": {"first batch begins": begun, "batches of the first step sampled": sampled},
        "score-0": {"first step scored": t_scored},
        "train-0": {"has the first step's batch": t_scored, "first step done": t_trained},
    }


def _moments(reached: dict[str, dict[str, float]], names: dict[str, list[Sampled]], called: float) -> Iterator[Moment]:
    for process, moments in reached.items():
        last: float | None = None
        for what, t in sorted(moments.items(), key=lambda moment: moment[1]):
            cpu = [sum(one.cpu_until(end) for one in names[process]) for end in (last or 0.0, t)]
            since_last = 0.0 if last is None else t - last
            yield Moment(
                process=process, what=what, seconds=t - called, since_last=since_last, cpu_seconds=cpu[1] - cpu[0]
            )
            last = t
