"""Broadcast between real processes: bit-exact, and a process that dies or stands still harms no other."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.stages.failpoints import Failpoints, go_on, wait_until_stopped
from support.weights.broadcasting import (
    CHUNKS,
    assert_is,
    broadcast_reader,
    broadcast_writer,
    digest_of,
    generator,
    offer_and_tend,
    sync_weights,
    tend_until_missing,
    weights_of,
)

from millrace.weights.base import WeightsId
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fingerprint import fingerprint

DEADLINE = 3.0
VERSIONS = 200


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[BroadcastWriter]:
    """sync_weights' end in this process, for two generators."""
    with broadcast_writer(tmp_path, 2, deadline_seconds=DEADLINE) as made:
        yield made


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[list[BroadcastReader]]:
    """Two generators' ends in this process."""
    with (
        broadcast_reader(tmp_path, 0, deadline_seconds=DEADLINE) as first,
        broadcast_reader(tmp_path, 1, deadline_seconds=DEADLINE) as second,
    ):
        yield [first, second]


def test_two_hundred_versions_arrive_bit_for_bit_at_two_generators(tmp_path: Path, writer: BroadcastWriter) -> None:
    none = Failpoints(tmp_path / "fired")
    with (
        generator(tmp_path, 0, none, deadline_seconds=DEADLINE, until=VERSIONS) as first,
        generator(tmp_path, 1, none, deadline_seconds=DEADLINE, until=VERSIONS) as second,
    ):
        for version in range(1, VERSIONS + 1):
            offer_and_tend(writer, version)
            expected = {"version": version, "digest": digest_of(version)}
            assert (first.line(), second.line()) == (expected, expected)
        # Their readers were not closed: the interpreter ends well all the same.
        assert (first.process.wait(), second.process.wait()) == (0, 0)


def test_only_loopback_is_listened_on(tmp_path: Path) -> None:
    none = Failpoints(tmp_path / "fired")
    with (
        broadcast_writer(tmp_path, 1, deadline_seconds=DEADLINE) as writer,
        generator(tmp_path, 0, none, deadline_seconds=DEADLINE) as child,
    ):
        offer_and_tend(writer, 1)
        for process in (psutil.Process(), psutil.Process(child.process.pid)):
            listening = {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
            assert listening == {"127.0.0.1"}


def test_a_generator_killed_while_it_receives_harms_no_other_and_catches_up_when_it_is_back(
    tmp_path: Path, writer: BroadcastWriter
) -> None:
    armed = Failpoints(tmp_path / "fired", f"generate-1 broadcast.chunk {2 * CHUNKS + 2} kill")
    with generator(tmp_path, 0, armed, deadline_seconds=DEADLINE) as other:
        with generator(tmp_path, 1, armed, deadline_seconds=DEADLINE) as killed:
            for version in (1, 2):
                offer_and_tend(writer, version)
                killed.read_until(version)
            writer.offer(weights_of(3))
            assert killed.process.wait() == -signal.SIGKILL
        assert armed.missed() == []
        tend_until_missing(writer, {1})
        assert other.read_until(3)[-1]["digest"] == digest_of(3)
        writer.offer(weights_of(4))
        tend_until_missing(writer, {1})
        assert other.read_until(4)[-1]["digest"] == digest_of(4)
        with generator(tmp_path, 1, armed, deadline_seconds=DEADLINE) as restarted:
            tend_until_missing(writer, set())
            assert restarted.line() == {"version": 4, "digest": digest_of(4)}
            offer_and_tend(writer, 5)
            assert restarted.line() == other.line() == {"version": 5, "digest": digest_of(5)}


@pytest.mark.parametrize("nth", [1, CHUNKS + 2])
def test_when_sync_weights_is_killed_as_it_sends_generators_wait_and_the_next_one_serves_them(
    nth: int, tmp_path: Path, readers: list[BroadcastReader]
) -> None:
    armed = Failpoints(tmp_path / "fired", f"sync_weights-0 broadcast.chunk {nth} kill")
    held: list[WeightsId | None] = [None, None]

    def take_all() -> None:
        for g, reader in enumerate(readers):
            taken = reader.take(held[g])
            if taken is not None:
                assert fingerprint(taken.tensors).digest == digest_of(taken.id.policy_version), armed.armed
                held[g] = taken.id

    with sync_weights(tmp_path, 2, armed, deadline_seconds=DEADLINE) as killed:
        killed.tell("deliver 1")
        killed.tell("deliver 2")
        while killed.process.poll() is None:
            take_all()
            time.sleep(0.002)
    assert armed.missed() == []
    for _ in range(100):
        take_all()
    assert all(one is None or one.policy_version == 1 for one in held)
    with sync_weights(tmp_path, 2, armed, deadline_seconds=DEADLINE) as successor:
        assert successor.ask("deliver 3") == {"missing": []}
    take_all()
    assert held == [weights_of(3).id] * 2


def test_a_frozen_sync_weights_holds_no_take_up(tmp_path: Path, readers: list[BroadcastReader]) -> None:
    reader = readers[0]
    with sync_weights(tmp_path, 1, Failpoints(tmp_path / "fired"), deadline_seconds=DEADLINE) as frozen:
        assert frozen.ask("deliver 1") == {"missing": []}
        assert_is(taken := reader.take(None), 1)
        assert taken is not None
        frozen.process.send_signal(signal.SIGSTOP)
        assert wait_until_stopped(frozen.process)
        assert [reader.take(taken.id) for _ in range(1000)] == [None] * 1000
        go_on(frozen.process)
        assert frozen.ask("deliver 2") == {"missing": []}
        assert_is(reader.take(taken.id), 2)


@pytest.mark.parametrize("place", ["broadcast.chunk", "broadcast.before_verify"])
def test_a_generator_frozen_past_the_deadline_is_missing_and_rejoins_by_itself(
    place: str, tmp_path: Path, writer: BroadcastWriter
) -> None:
    nth = CHUNKS + 2 if place == "broadcast.chunk" else 2
    armed = Failpoints(tmp_path / "fired", f"generate-1 {place} {nth} stop")
    with (
        generator(tmp_path, 0, armed, deadline_seconds=DEADLINE) as other,
        generator(tmp_path, 1, armed, deadline_seconds=DEADLINE) as frozen,
    ):
        offer_and_tend(writer, 1)
        for version in range(2, 12):
            writer.offer(weights_of(version))
            tend_until_missing(writer, {1})
            assert other.read_until(version)[-1]["digest"] == digest_of(version)
        assert wait_until_stopped(frozen.process)
        assert armed.missed() == []
        go_on(frozen.process)
        tend_until_missing(writer, set())
        lines = frozen.read_until(11)
        assert all(line["digest"] == digest_of(line["version"]) for line in lines), armed.armed
        offer_and_tend(writer, 12)
        assert frozen.line() == {"version": 12, "digest": digest_of(12)}


def test_a_byte_that_flips_on_the_way_is_refused_by_name_and_the_version_sent_again(tmp_path: Path) -> None:
    places = [f"generate-0 broadcast.before_verify {nth} stop" for nth in (1, 2)]
    armed = Failpoints(tmp_path / "fired", *places)
    with (
        broadcast_writer(tmp_path, 1, deadline_seconds=DEADLINE) as writer,
        generator(tmp_path, 0, armed, deadline_seconds=DEADLINE) as child,
    ):

        def flip_twice() -> None:
            for _ in places:
                assert wait_until_stopped(child.process)
                with (tmp_path / "received-0-0").open("r+b") as file:
                    file.seek(1234)
                    byte = file.read(1)[0]
                    file.seek(1234)
                    file.write(bytes([byte ^ 4]))
                go_on(child.process)

        flipping = threading.Thread(target=flip_twice)
        flipping.start()
        offer_and_tend(writer, 1)
        flipping.join()
        assert armed.missed() == []
        *refused, last = child.read_until(1)
        assert last["digest"] == digest_of(1)
        # The second may have come before the first was noticed.
        assert 1 <= len(refused) <= 2
        assert all("version 1 " in line["refused"] and "embed" in line["refused"] for line in refused)
        assert all("head" not in line["refused"] for line in refused)
