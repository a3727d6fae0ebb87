"""The tracker of acknowledgements: late and returning generators, superseded versions, wrong weights."""

from typing import Any

from millrace.weights.acknowledgements import AckTracker, Arrival, Notification
from millrace.weights.base import WeightsId

START = 1000.0
DEADLINE = 30.0


def version(policy_version: int, t_offered: float = START, incarnation: int = 0) -> WeightsId:
    return WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=t_offered)


def status(weights_id: WeightsId, *, digest: str | None = None, **values: Any) -> dict[str, Any]:
    """The status record of a generator that works with these weights."""
    return {
        "incarnation": weights_id.incarnation,
        "policy_version": weights_id.policy_version,
        "weights_digest": digest_of(weights_id) if digest is None else digest,
        "t_updated": weights_id.t_offered + 0.25,
        **values,
    }


def digest_of(weights_id: WeightsId) -> str:
    return f"digest of {weights_id.incarnation}.{weights_id.policy_version}"


def tracked(num_generators: int = 2, opened: float = 0.0, falls_back: bool = True) -> AckTracker:
    return AckTracker(num_generators, deadline_seconds=DEADLINE, opened=opened, falls_back=falls_back)


def sentences(seen: tuple[list[Notification], Arrival | None]) -> list[str]:
    return [notification.sentence for notification in seen[0]]


def events(seen: tuple[list[Notification], Arrival | None]) -> list[tuple[str | None, int]]:
    return [(notification.event, notification.generator) for notification in seen[0]]


def push(acks: AckTracker, weights_id: WeightsId) -> None:
    acks.push(weights_id, digest_of(weights_id))


def test_a_version_has_arrived_once_the_slowest_generator_has_it() -> None:
    acks = tracked()
    push(acks, version(3))
    assert acks.look([status(version(3)), {}], START + 1)[1] is None
    assert acks.awaited
    slowest = status(version(3)) | {"t_updated": START + 4}
    seen = acks.look([status(version(3), pause_seconds=0.5), slowest | {"pause_seconds": 0.125}], START + 5)
    assert seen[1] == Arrival(push_seconds=4.0, generator_pause_seconds_max=0.5, fallbacks=0)
    assert sentences(seen) == []
    assert not acks.awaited
    assert acks.look([status(version(3)), slowest], START + 6)[1] is None


def test_a_late_generator_is_reported_once_and_does_not_hold_back_others() -> None:
    acks = tracked()
    push(acks, version(12))
    statuses = [status(version(12)), {}]
    assert sentences(acks.look(statuses, START + DEADLINE)) == []
    seen = acks.look(statuses, START + DEADLINE + 0.5)
    assert events(seen) == [("generator.lost", 1)]
    assert acks.late == [1]
    assert seen[1] is not None
    assert seen[1].fallbacks == 1
    assert sentences(acks.look(statuses, START + 90)) == []
    push(acks, version(13, START + 91))
    later = acks.look([status(version(13)), {}], START + 200)
    assert sentences(later) == []
    assert later[1] is not None


def test_a_generator_that_acknowledges_again_is_back() -> None:
    acks = tracked()
    push(acks, version(12))
    acks.look([status(version(12)), {}], START + 31)
    push(acks, version(17, START + 40))
    seen = acks.look([status(version(17)), status(version(17), weights_route="store")], START + 41)
    assert events(seen) == [("generator.rejoined", 1)]
    assert "version 17 after 41 s, by store" in sentences(seen)[0]
    assert acks.late == []
    assert not acks.awaited


def test_a_generator_back_at_an_old_version_has_a_new_deadline() -> None:
    acks = tracked(1)
    push(acks, version(12))
    acks.look([{}], START + 31)
    push(acks, version(17, START + 40))
    back = START + 100
    assert events(acks.look([status(version(12))], back)) == [("generator.rejoined", 0)]
    assert events(acks.look([status(version(12))], back + DEADLINE)) == []
    (named,) = sentences(acks.look([status(version(12))], back + DEADLINE + 1))
    assert "no version 17 after 31 s" in named


def test_a_generator_that_keeps_acknowledging_is_never_late() -> None:
    acks = tracked(1)
    for step in range(100):
        push(acks, version(step, START + 20 * step))
        # Always an older version: two steps old, 40 s after its hand-over.
        seen = acks.look([status(version(max(0, step - 2), START + 20 * (step - 2)))], START + 20 * step)
        assert sentences(seen) == []
    assert acks.awaited


def test_a_silent_generator_is_late_for_the_first_superseded_version() -> None:
    acks = tracked(1)
    reported = []
    for step in range(10):
        push(acks, version(step, START + 5 * step))
        reported += sentences(acks.look([{}], START + 5 * step))
    (sentence,) = reported
    assert "version 0 after 35 s" in sentence


def test_a_superseded_version_no_longer_arrives() -> None:
    acks = tracked()
    push(acks, version(3))
    assert acks.look([status(version(3)), {}], START + 1)[1] is None
    push(acks, version(4, START + 2))
    assert acks.look([status(version(3)), status(version(3))], START + 3)[1] is None
    seen = acks.look([status(version(4, START + 2))] * 2, START + 3)
    assert seen[1] == Arrival(push_seconds=0.25, generator_pause_seconds_max=0.0, fallbacks=0)


def test_other_weights_under_the_same_version_are_an_alarm() -> None:
    acks = tracked()
    push(acks, version(12))
    statuses = [status(version(12)), status(version(12), digest="deadbeef")]
    seen = acks.look(statuses, START + 1)
    assert events(seen) == [(None, 1)]
    assert "deadbeef" in sentences(seen)[0]
    assert seen[1] is None
    assert events(acks.look(statuses, START + 2)) == []
    assert events(acks.look(statuses, START + 31)) == [("generator.lost", 1)]
    push(acks, version(13, START + 40))
    assert acks.look([status(version(13))] * 2, START + 41)[1] is not None


def test_the_deadline_begins_when_the_tracker_opens() -> None:
    acks = tracked(1, opened=START + 500)
    push(acks, version(12))
    assert sentences(acks.look([{}], START + 500 + DEADLINE)) == []
    assert sentences(acks.look([{}], START + 501 + DEADLINE)) != []


def test_the_deadline_begins_when_the_generator_is_ready() -> None:
    acks = tracked(1)
    push(acks, version(0))
    assert sentences(acks.look([{"t_main": START, "t_ready": None}], START + 300)) == []
    ready = {"t_main": START, "t_ready": START + 300}
    assert sentences(acks.look([ready], START + 300 + DEADLINE)) == []
    assert sentences(acks.look([ready], START + 301 + DEADLINE)) != []


def test_a_restarted_generator_has_to_acknowledge_again() -> None:
    acks = tracked(1)
    push(acks, version(12))
    previous = status(version(12))
    assert acks.look([previous], START + 1)[1] is not None
    again = previous | {"process": "another", "t_ready": START + 6}
    assert sentences(acks.look([again], START + 7)) == []
    assert acks.awaited
    assert sentences(acks.look([again], START + 7 + DEADLINE + 1)) != []
    assert acks.late == [0]
    acknowledged = again | {"t_updated": START + 50, "acknowledged_by": "another", "weights_route": "shm"}
    assert events(acks.look([acknowledged], START + 51)) == [("generator.rejoined", 0)]


def test_without_a_fallback_a_late_generator_is_reported_too() -> None:
    acks = tracked(1, falls_back=False)
    push(acks, version(12))
    assert events(acks.look([{}], START + 31)) == [("generator.lost", 0)]


def test_a_version_of_an_earlier_incarnation_is_not_an_acknowledgement() -> None:
    acks = tracked(1)
    push(acks, version(5, incarnation=1))
    assert acks.look([status(version(9))], START + 1)[1] is None
    assert acks.look([status(version(5, incarnation=1))], START + 2)[1] is not None


def test_a_clock_that_was_set_back_does_not_hide_an_acknowledgement() -> None:
    acks = tracked(1)
    push(acks, version(12))
    there = status(version(12)) | {"t_main": START, "t_updated": START - 3600}
    assert acks.look([there], START + 1)[1] is not None
    assert not acks.awaited
