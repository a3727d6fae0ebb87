"""`direct` and `gloo` between real processes: bit-exact, and a process that dies or stands still harms no other."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.stages.failpoints import Failpoints, go_on, wait_until_stopped
from support.weights.direct import Child, digest_of, generator, sync_weights, trainer_rank

DEADLINES = {"direct": 3.0, "gloo": 6.0}
RANKS, GENERATORS = 2, 2
POINTS = {
    "sync_weights-0": ["direct.taken", "direct.announced", "direct.gone", "direct.done"],
    "train-1": ["direct.before_snapshot", "direct.after_snapshot", "direct.offered", "direct.ready", "direct.hop"],
    "generate-1": ["direct.ready", "direct.hop", "direct.before_hashes", "direct.before_arrival", "direct.arrived"],
}
"""Where each kind of process is killed."""
LIVE_POINTS = {
    "sync_weights-0": ["direct.taken", "direct.announced", "direct.gone", "direct.done"],
    "train-0": ["direct.ready", "live.tensor"],
    "train-1": ["direct.before_snapshot", "direct.offered", "direct.ready", "live.tensor"],
    "generate-1": ["live.call", "live.received"],
}
"""The same for `gloo`."""


class Everyone:
    """Two trainer ranks, sync_weights and two generators, each a process; one that has died can be started again."""

    def __init__(self, folder: Path, failpoints: Failpoints, stack: ExitStack, transport: str) -> None:
        self._options: dict[str, Any] = {"deadline_seconds": DEADLINES[transport], "transport": transport}
        self._folder = folder
        self._failpoints = failpoints
        self._stack = stack
        self.processes: dict[str, Child] = {}
        for name in ("sync_weights-0", "train-0", "train-1", "generate-0", "generate-1"):
            self.start(name)

    def start(self, name: str) -> Child:
        """Starts it, again if it has died."""
        kind, _, number = name.rpartition("-")
        folder, armed = self._folder, self._failpoints
        match kind:
            case "train":
                made = trainer_rank(folder, int(number), (RANKS, 1), armed, **self._options)
            case "generate":
                made = generator(folder, int(number), armed, **self._options)
            case _:
                made = sync_weights(folder, GENERATORS, armed, **self._options)
        self.processes[name] = self._stack.enter_context(made)
        return self.processes[name]

    def offer(self, version: int, *ranks: str) -> None:
        """Has these ranks offer a version, all if none are named; those that die of it don't answer."""
        for name in ranks or ("train-0", "train-1"):
            child = self.processes[name]
            child.command(f"offer {version}")
            assert child.process.stdout is not None
            child.process.stdout.readline()

    def all_have(self, version: int) -> None:
        """Waits until every generator has a version, and checks all versions that they took."""
        self.processes["sync_weights-0"].read_until_all_have(version)
        for number in range(GENERATORS):
            for line in self.processes[f"generate-{number}"].read_until(version):
                assert line["digest"] == digest_of(line["version"]), line


@contextmanager
def everyone(folder: Path, failpoints: Failpoints, transport: str = "direct") -> Iterator[Everyone]:
    with ExitStack() as stack:
        yield Everyone(folder, failpoints, stack, transport)


@pytest.mark.slow
def test_versions_arrive_bit_for_bit_and_only_loopback_is_listened_on(tmp_path: Path) -> None:
    with everyone(tmp_path, Failpoints(tmp_path / "fired")) as world:
        for version in range(1, 21):
            world.offer(version)
            world.all_have(version)
        for child in world.processes.values():
            connections = psutil.Process(child.process.pid).net_connections()
            assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}


def killed_and_back(folder: Path, name: str, place: str, nth: int, transport: str = "direct") -> None:
    """A process is killed at a place while versions are pushed; all get the newest once it is back."""
    armed = Failpoints(folder / "fired", f"{name} {place} {nth} kill")
    with everyone(folder, armed, transport) as world:
        killed, version = world.processes[name].process, 0
        while killed.poll() is None:
            version += 1
            assert version < 20, f"{name} was never killed at {place}"
            world.offer(version)
            limit = time.monotonic() + 0.3
            while killed.poll() is None and time.monotonic() < limit:
                time.sleep(0.01)
        assert killed.wait() == -signal.SIGKILL
        assert armed.missed() == []
        world.start(name)
        began = time.monotonic()
        newest = version + 1
        world.offer(newest)
        world.all_have(newest)
        assert time.monotonic() - began < 4 * DEADLINES[transport], "somebody hung"
        for number in range(GENERATORS):
            assert world.processes[f"generate-{number}"].process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("generate-1", "direct.hop"),
        pytest.param("sync_weights-0", "direct.gone", marks=pytest.mark.extended),
        pytest.param("train-1", "direct.hop", marks=pytest.mark.extended),
    ],
)
def test_all_recover_after_a_process_is_killed_during_a_push(name: str, place: str, tmp_path: Path) -> None:
    killed_and_back(tmp_path, name, place, 2)


@pytest.mark.faults
@pytest.mark.parametrize("nth", [1, 2, 4, 7])
@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in LIVE_POINTS.items() for place in places])
def test_a_process_killed_at_any_point_of_a_live_push_tears_nothing_and_all_recover(
    name: str, place: str, nth: int, tmp_path: Path
) -> None:
    killed_and_back(tmp_path, name, place, nth, "gloo")


@pytest.mark.faults
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in POINTS.items() for place in places])
def test_a_process_killed_at_any_point_of_a_push_tears_nothing_and_all_recover(
    name: str, place: str, nth: int, tmp_path: Path
) -> None:
    killed_and_back(tmp_path, name, place, nth)


@pytest.mark.extended
def test_a_generator_that_is_away_harms_no_other_and_catches_up_when_it_is_back(tmp_path: Path) -> None:
    with everyone(tmp_path, Failpoints(tmp_path / "fired")) as world:
        world.offer(1)
        world.all_have(1)
        away = world.processes["generate-1"].process
        away.kill()
        away.wait()
        for version in (2, 3):
            world.offer(version)
            assert world.processes["generate-0"].read_until(version)[-1]["digest"] == digest_of(version)
        world.start("generate-1")
        assert world.processes["generate-1"].line() == {"version": 3, "digest": digest_of(3)}
        world.offer(4)
        world.all_have(4)


@pytest.mark.extended
def test_a_frozen_sync_weights_holds_neither_a_take_nor_the_trainer_up(tmp_path: Path) -> None:
    with everyone(tmp_path, Failpoints(tmp_path / "fired")) as world:
        world.offer(1)
        world.all_have(1)
        frozen = world.processes["sync_weights-0"].process
        frozen.send_signal(signal.SIGSTOP)
        assert wait_until_stopped(frozen)
        began = time.monotonic()
        for version in (2, 3):
            # Within the deadline: a rank may be waiting for an answer, and then holds its snapshot.
            world.offer(version)
        assert time.monotonic() - began < 2 * DEADLINES["direct"]
        go_on(frozen)
        world.offer(4)
        world.all_have(4)


@pytest.mark.extended
@pytest.mark.parametrize("place", ["direct.hop", "direct.before_hashes"])
def test_a_generator_frozen_past_the_deadline_is_missing_and_rejoins_by_itself(place: str, tmp_path: Path) -> None:
    armed = Failpoints(tmp_path / "fired", f"generate-1 {place} 3 stop")
    with everyone(tmp_path, armed) as world:
        frozen, other = world.processes["generate-1"], world.processes["generate-0"]
        version = 0
        while psutil.Process(frozen.process.pid).status() != psutil.STATUS_STOPPED:
            version += 1
            world.offer(version)
            time.sleep(0.3)
        assert armed.missed() == []
        for following in range(3):
            world.offer(version + 1 + following)
        version += 3
        assert other.read_until(version)[-1]["digest"] == digest_of(version)
        go_on(frozen.process)
        lines = frozen.read_until(version)
        assert all(line["digest"] == digest_of(line["version"]) for line in lines), armed.armed
        world.offer(version + 1)
        assert frozen.read_until(version + 1)[-1] == {"version": version + 1, "digest": digest_of(version + 1)}


@pytest.mark.slow
def test_a_tensor_damaged_in_transit_is_refused_and_sent_again(tmp_path: Path) -> None:
    armed = Failpoints(tmp_path / "fired", "generate-1 direct.before_hashes 1 stop")
    with everyone(tmp_path, armed) as world:
        child = world.processes["generate-1"]

        def flip() -> None:
            assert wait_until_stopped(child.process)
            with (tmp_path / "received-1-0").open("r+b") as file:
                file.seek(1234)
                byte = file.read(1)[0]
                file.seek(1234)
                file.write(bytes([byte ^ 4]))
            go_on(child.process)

        flipping = threading.Thread(target=flip)
        flipping.start()
        world.offer(1)
        flipping.join()
        refused, last = child.read_until(1)
        assert refused["refused"].endswith(" embed")
        assert last["digest"] == digest_of(1)
