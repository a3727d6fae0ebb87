"""The tracker of acknowledgements: who is late, who is back, what is superseded, whose weights are wrong."""

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


def push(acks: AckTracker, weights_id: WeightsId) -> None:
    acks.push(weights_id, digest_of(weights_id))


def test_a_version_has_arrived_once_the_slowest_generator_works_with_it() -> None:
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


def test_a_generator_that_is_late_is_named_once_and_the_others_arrive_without_it() -> None:
    acks = tracked()
    push(acks, version(12))
    statuses = [status(version(12)), {}]
    assert sentences(acks.look(statuses, START + DEADLINE)) == []
    seen = acks.look(statuses, START + DEADLINE + 0.5)
    assert sentences(seen) == [
        "generator 1 has no version 12 after 30 s: it is served by the store, and the others continue"
    ]
    assert acks.late == [1]
    assert seen[1] is not None
    assert seen[1].fallbacks == 1
    assert sentences(acks.look(statuses, START + 90)) == []
    push(acks, version(13, START + 91))
    later = acks.look([status(version(13)), {}], START + 200)
    assert sentences(later) == []
    assert later[1] is not None


def test_a_generator_that_acknowledges_again_is_back_and_names_its_route() -> None:
    acks = tracked()
    push(acks, version(12))
    acks.look([status(version(12)), {}], START + 31)
    push(acks, version(17, START + 40))
    seen = acks.look([status(version(17)), status(version(17), weights_route="store")], START + 41)
    assert sentences(seen) == ["generator 1 is back at version 17 after 41 s, by store"]
    assert acks.late == []
    assert not acks.awaited


def test_a_generator_that_is_back_at_an_old_version_has_the_deadline_again_for_the_newest() -> None:
    acks = tracked(1)
    push(acks, version(12))
    acks.look([{}], START + 31)
    push(acks, version(17, START + 40))
    back = START + 100
    assert sentences(acks.look([status(version(12))], back)) == ["generator 0 is back at version 12 after 100 s"]
    assert sentences(acks.look([status(version(12))], back + DEADLINE)) == []
    (named,) = sentences(acks.look([status(version(12))], back + DEADLINE + 1))
    assert "no version 17 after 31 s" in named


def test_a_generator_that_keeps_acknowledging_is_never_late_however_many_versions_are_superseded() -> None:
    acks = tracked(1)
    for step in range(100):
        push(acks, version(step, START + 20 * step))
        # Always the version before: two steps old, 40 s after its hand-over.
        seen = acks.look([status(version(max(0, step - 2), START + 20 * (step - 2)))], START + 20 * step)
        assert sentences(seen) == []
    assert acks.awaited


def test_a_generator_that_acknowledges_nothing_is_late_for_the_first_of_superseded_versions() -> None:
    acks = tracked(1)
    found = []
    for step in range(10):
        push(acks, version(step, START + 5 * step))
        found += sentences(acks.look([{}], START + 5 * step))
    assert found == ["generator 0 has no version 0 after 35 s: it is served by the store, and the others continue"]


def test_a_superseded_version_does_not_arrive_any_more_and_the_newer_one_does() -> None:
    acks = tracked()
    push(acks, version(3))
    assert acks.look([status(version(3)), {}], START + 1)[1] is None
    push(acks, version(4, START + 2))
    assert acks.look([status(version(3)), status(version(3))], START + 3)[1] is None
    seen = acks.look([status(version(4, START + 2))] * 2, START + 3)
    assert seen[1] == Arrival(push_seconds=0.25, generator_pause_seconds_max=0.0, fallbacks=0)


def test_other_weights_under_the_same_version_are_an_alarm_and_no_acknowledgement() -> None:
    acks = tracked()
    push(acks, version(12))
    statuses = [status(version(12)), status(version(12), digest="deadbeef")]
    seen = acks.look(statuses, START + 1)
    assert sentences(seen) == [
        "ALARM: generator 1 uses other weights than version 12: their digest is deadbeef, "
        "the pushed version's is digest of 0.12"
    ]
    assert seen[1] is None
    assert sentences(acks.look(statuses, START + 2)) == []
    (named,) = sentences(acks.look(statuses, START + 31))
    assert "generator 1 has no version 12" in named
    push(acks, version(13, START + 40))
    assert acks.look([status(version(13))] * 2, START + 41)[1] is not None


def test_no_generator_is_late_for_the_time_in_which_nothing_was_pushed() -> None:
    acks = tracked(1, opened=START + 500)
    push(acks, version(12))
    assert sentences(acks.look([{}], START + 500 + DEADLINE)) == []
    assert sentences(acks.look([{}], START + 501 + DEADLINE)) != []


def test_the_time_of_a_generator_that_loads_its_model_begins_when_it_is_ready() -> None:
    acks = tracked(1)
    push(acks, version(0))
    assert sentences(acks.look([{"t_main": START, "t_ready": None}], START + 300)) == []
    ready = {"t_main": START, "t_ready": START + 300}
    assert sentences(acks.look([ready], START + 300 + DEADLINE)) == []
    assert sentences(acks.look([ready], START + 301 + DEADLINE)) != []


def test_what_a_predecessor_acknowledged_does_not_count_for_a_generator_that_started_again() -> None:
    acks = tracked(1)
    push(acks, version(12))
    before = status(version(12))
    assert acks.look([before], START + 1)[1] is not None
    again = before | {"process": "another", "t_ready": START + 6}
    assert sentences(acks.look([again], START + 7)) == []
    assert acks.awaited
    assert sentences(acks.look([again], START + 7 + DEADLINE + 1)) != []
    assert acks.late == [0]
    there = again | {"t_updated": START + 50, "acknowledged_by": "another", "weights_route": "shm"}
    assert sentences(acks.look([there], START + 51)) == ["generator 0 is back at version 12 after 44 s, by shm"]


def test_without_a_fallback_a_late_generator_is_named_too() -> None:
    acks = tracked(1, falls_back=False)
    push(acks, version(12))
    (notification,), _ = acks.look([{}], START + 31)
    assert (notification.event, notification.generator) == ("generator.lost", 0)


def test_the_alarm_comes_for_a_superseded_version_too() -> None:
    acks = tracked(1)
    push(acks, version(12))
    push(acks, version(13))
    (alarm,), _ = acks.look([status(version(12), digest="deadbeef")], START + 1)
    assert (alarm.event, alarm.generator) == (None, 0)


def test_a_version_of_an_earlier_incarnation_does_not_acknowledge_this_one() -> None:
    acks = tracked(1)
    push(acks, version(5, incarnation=1))
    assert acks.look([status(version(9))], START + 1)[1] is None
    assert acks.look([status(version(5, incarnation=1))], START + 2)[1] is not None


def test_a_generator_whose_clock_was_set_back_acknowledges_all_the_same() -> None:
    acks = tracked(1)
    push(acks, version(12))
    there = status(version(12)) | {"t_main": START, "t_updated": START - 3600}
    assert acks.look([there], START + 1)[1] is not None
    assert not acks.awaited
