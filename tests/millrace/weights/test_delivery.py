"""The books of deliveries: who is late, who is back, what is superseded, whose weights are wrong."""

from typing import Any

from millrace.weights.base import WeightsId
from millrace.weights.delivery import Arrival, Deliveries, Seen

START = 1000.0
DEADLINE = 30.0


def version(policy_version: int, t_offered: float = START, incarnation: int = 0) -> WeightsId:
    return WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=t_offered)


def life(weights_id: WeightsId, *, digest: str | None = None, **values: Any) -> dict[str, Any]:
    """The sign of life of a generator that works with these weights."""
    return {
        "incarnation": weights_id.incarnation,
        "policy_version": weights_id.policy_version,
        "weights_digest": digest_of(weights_id) if digest is None else digest,
        "t_updated": weights_id.t_offered + 0.25,
        **values,
    }


def digest_of(weights_id: WeightsId) -> str:
    return f"digest of {weights_id.incarnation}.{weights_id.policy_version}"


def deliveries(num_generators: int = 2, opened: float = 0.0, falls_back: bool = True) -> Deliveries:
    return Deliveries(num_generators, deadline_seconds=DEADLINE, opened=opened, falls_back=falls_back)


def said(seen: Seen) -> list[str]:
    return [news.sentence for news in seen.news]


def push(books: Deliveries, weights_id: WeightsId) -> None:
    books.push(weights_id, digest_of(weights_id))


def test_a_version_has_arrived_once_the_slowest_generator_works_with_it() -> None:
    books = deliveries()
    push(books, version(3))
    assert books.look([life(version(3)), {}], START + 1).arrival is None
    assert books.awaited
    slowest = life(version(3)) | {"t_updated": START + 4}
    seen = books.look([life(version(3), pause_seconds=0.5), slowest | {"pause_seconds": 0.125}], START + 5)
    assert seen.arrival == Arrival(push_seconds=4.0, generator_pause_seconds_max=0.5, fallbacks=0)
    assert said(seen) == []
    assert not books.awaited
    assert books.look([life(version(3)), slowest], START + 6).arrival is None


def test_a_generator_that_is_late_is_named_once_and_the_others_arrive_without_it() -> None:
    books = deliveries()
    push(books, version(12))
    lives = [life(version(12)), {}]
    assert said(books.look(lives, START + DEADLINE)) == []
    seen = books.look(lives, START + DEADLINE + 0.5)
    assert said(seen) == [
        "generator 1 has not taken version 12 after 30 s: it is served through the store and the others go on"
    ]
    assert books.late == [1]
    assert seen.arrival is not None
    assert seen.arrival.fallbacks == 1
    assert said(books.look(lives, START + 90)) == []
    push(books, version(13, START + 91))
    later = books.look([life(version(13)), {}], START + 200)
    assert said(later) == []
    assert later.arrival is not None


def test_without_a_way_round_it_is_only_named() -> None:
    books = deliveries(1, falls_back=False)
    push(books, version(12))
    assert said(books.look([{}], START + 31)) == [
        "generator 0 has not taken version 12 after 31 s: the others go on without it"
    ]


def test_a_generator_that_acknowledges_again_is_back_and_says_by_which_way() -> None:
    books = deliveries()
    push(books, version(12))
    books.look([life(version(12)), {}], START + 31)
    push(books, version(17, START + 40))
    seen = books.look([life(version(17)), life(version(17), weights_route="store")], START + 41)
    assert said(seen) == ["generator 1 is back at version 17 after 41 s, by store"]
    assert books.late == []
    assert not books.awaited


def test_a_generator_that_is_back_at_an_old_version_has_the_deadline_again_for_the_newest() -> None:
    books = deliveries(1)
    push(books, version(12))
    books.look([{}], START + 31)
    push(books, version(17, START + 40))
    back = START + 100
    assert said(books.look([life(version(12))], back)) == ["generator 0 is back at version 12 after 100 s"]
    assert said(books.look([life(version(12))], back + DEADLINE)) == []
    (named,) = said(books.look([life(version(12))], back + DEADLINE + 1))
    assert "not taken version 17 after 31 s" in named


def test_nobody_is_late_who_keeps_acknowledging_however_many_versions_are_superseded() -> None:
    books = deliveries(1)
    for step in range(100):
        push(books, version(step, START + 20 * step))
        # Always the version before: two steps old, 40 s after its hand-over.
        seen = books.look([life(version(max(0, step - 2), START + 20 * (step - 2)))], START + 20 * step)
        assert said(seen) == []
    assert books.awaited


def test_who_acknowledges_nothing_while_versions_supersede_each_other_is_late_for_the_first_of_them() -> None:
    books = deliveries(1)
    sentences = []
    for step in range(10):
        push(books, version(step, START + 5 * step))
        sentences += said(books.look([{}], START + 5 * step))
    assert sentences == [
        "generator 0 has not taken version 0 after 35 s: it is served through the store and the others go on"
    ]


def test_a_superseded_version_does_not_arrive_any_more_and_the_newer_one_does() -> None:
    books = deliveries()
    push(books, version(3))
    assert books.look([life(version(3)), {}], START + 1).arrival is None
    push(books, version(4, START + 2))
    assert books.look([life(version(3)), life(version(3))], START + 3).arrival is None
    seen = books.look([life(version(4, START + 2))] * 2, START + 3)
    assert seen.arrival == Arrival(push_seconds=0.25, generator_pause_seconds_max=0.0, fallbacks=0)


def test_other_weights_under_the_same_version_are_an_alarm_and_no_acknowledgement() -> None:
    books = deliveries()
    push(books, version(12))
    lives = [life(version(12)), life(version(12), digest="deadbeef")]
    seen = books.look(lives, START + 1)
    assert said(seen) == [
        "ALARM: generator 1 works with other weights than version 12: their digest is deadbeef, "
        "that of what was pushed is digest of 0.12"
    ]
    assert seen.arrival is None
    assert said(books.look(lives, START + 2)) == []
    (named,) = said(books.look(lives, START + 31))
    assert "generator 1 has not taken version 12" in named
    push(books, version(13, START + 40))
    assert books.look([life(version(13))] * 2, START + 41).arrival is not None


def test_the_alarm_comes_for_a_superseded_version_too() -> None:
    books = deliveries(1)
    push(books, version(12))
    push(books, version(13))
    (alarm,) = said(books.look([life(version(12), digest="deadbeef")], START + 1))
    assert alarm.startswith("ALARM: generator 0 works with other weights than version 12")


def test_a_version_of_an_earlier_incarnation_is_none_of_this_one() -> None:
    books = deliveries(1)
    push(books, version(5, incarnation=1))
    assert books.look([life(version(9))], START + 1).arrival is None
    assert books.look([life(version(5, incarnation=1))], START + 2).arrival is not None


def test_nobody_is_late_for_the_time_in_which_nothing_was_pushed() -> None:
    books = deliveries(1, opened=START + 500)
    push(books, version(12))
    assert said(books.look([{}], START + 500 + DEADLINE)) == []
    assert said(books.look([{}], START + 501 + DEADLINE)) != []


def test_the_time_of_a_generator_that_loads_its_model_begins_when_it_is_ready() -> None:
    books = deliveries(1)
    push(books, version(0))
    assert said(books.look([{"t_main": START, "t_ready": None}], START + 300)) == []
    ready = {"t_main": START, "t_ready": START + 300}
    assert said(books.look([ready], START + 300 + DEADLINE)) == []
    assert said(books.look([ready], START + 301 + DEADLINE)) != []


def test_what_a_predecessor_acknowledged_does_not_count_for_a_generator_that_started_again() -> None:
    books = deliveries(1)
    push(books, version(12))
    before = life(version(12))
    assert books.look([before], START + 1).arrival is not None
    again = before | {"t_main": START + 5, "t_ready": START + 6}
    assert said(books.look([again], START + 7)) == []
    assert books.awaited
    assert said(books.look([again], START + 7 + DEADLINE + 1)) != []
    assert books.late == [0]
    there = again | {"t_updated": START + 50, "weights_route": "shm"}
    assert said(books.look([there], START + 51)) == ["generator 0 is back at version 12 after 44 s, by shm"]
