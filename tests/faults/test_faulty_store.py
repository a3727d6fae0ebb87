"""The kit keeps its own promises: each fault does what it says, as often as it says, from its seed alone."""

import pytest
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore

from storage.errors import NotInStore

SEEDS = (0,)
ALWAYS = 1.0


def test_an_error_before_has_done_nothing_and_an_error_after_has_done_it(seed: int) -> None:
    inner = DictStore()
    before = FaultyStore(inner, seed, error_before=ALWAYS)
    for call in (lambda: before.put("a", b"1"), lambda: before.put_if_absent("a", b"1"), lambda: before.get("a")):
        with pytest.raises(OSError):
            call()
    assert inner.objects == {}
    after = FaultyStore(inner, seed, error_after=ALWAYS)
    for call in (lambda: after.put_if_absent("a", b"1"), lambda: after.put("b", b"2")):
        with pytest.raises(OSError):
            call()
    assert inner.objects == {"a": b"1", "b": b"2"}
    assert (before.fired["error_before"], after.fired["error_after"]) == (3, 2)


def test_a_lost_reply_is_a_create_that_happened_and_was_denied(seed: int) -> None:
    inner = DictStore()
    store = FaultyStore(inner, seed, lost_reply=ALWAYS)
    assert not store.put_if_absent("a", b"mine")
    assert not store.put_if_absent("a", b"again")
    assert inner.objects == {"a": b"mine"}
    assert store.fired["lost_reply"] == 1


def test_a_stale_read_hides_a_record_only_from_who_looked_too_early(seed: int) -> None:
    inner = DictStore()
    early, late = FaultyStore(inner, seed, stale_read=ALWAYS), FaultyStore(inner, seed, stale_read=ALWAYS)
    with pytest.raises(NotInStore):
        early.get("s/log/0")
    inner.put_if_absent("s/log/0", b"record")
    assert bytes(late.get("s/log/0")) == b"record"
    with pytest.raises(NotInStore):
        early.get("s/log/0")
    for _ in range(3):
        try:
            early.get("s/log/0")
        except NotInStore:
            continue
    assert bytes(early.get("s/log/0")) == b"record"
    assert 1 <= early.fired["stale_read"] <= 3
    assert late.fired["stale_read"] == 0


def test_a_torn_put_leaves_a_beginning_of_its_data_under_the_final_name(seed: int) -> None:
    inner = DictStore()
    store = FaultyStore(inner, seed, torn_put=ALWAYS)
    for name in range(20):
        with pytest.raises(OSError):
            store.put_if_absent(f"{name}", b"0123456789")
    assert all(len(data) < 10 and b"0123456789".startswith(data) for data in inner.objects.values())
    assert len(inner.objects) == store.fired["torn_put"] == 20


def test_a_bit_flip_changes_one_bit_that_is_read_and_nothing_that_is_stored(seed: int) -> None:
    inner = DictStore({"a": bytes(100)})
    store = FaultyStore(inner, seed, bit_flip=ALWAYS)
    read = [bytes(store.get("a")) for _ in range(20)]
    assert all(sum(byte.bit_count() for byte in data) == 1 for data in read)
    assert len(set(read)) > 10
    assert inner.objects == {"a": bytes(100)}
    assert store.fired["bit_flip"] == 20


def test_a_crash_undoes_the_writes_whose_fsync_was_dropped_and_no_others(seed: int) -> None:
    inner = DictStore({"old": b"old"})
    store = FaultyStore(inner, seed, dropped_fsync=Fault(calls=frozenset({1, 3, 4})))
    store.put_if_absent("0", b"")
    store.put_if_absent("1", b"")
    for data in (b"kept", b"lost", b"lost, too"):
        store.put("old", data)
    assert bytes(store.get("old")) == b"lost, too"
    assert store.crash() == ["1", "old"]
    assert inner.objects == {"0": b"", "old": b"kept"}
    assert store.crash() == []


def test_faults_strike_at_their_rate_paths_and_calls_and_a_seed_repeats_them(seed: int) -> None:
    def strikes(seed: int) -> tuple[list[bool], list[bool]]:
        chance = Fault(rate=0.25, paths="a/*")
        exact = Fault(calls=frozenset({2, 5}), paths="b/*")
        store = FaultyStore(DictStore(), seed, lost_reply=chance, dropped_fsync=exact)
        lost = [not store.put_if_absent(f"a/{name}", b"") for name in range(400)]
        for name in range(10):
            store.put_if_absent(f"b/{name}", b"")
        crashed = store.crash()
        return lost, [f"b/{name}" in crashed for name in range(10)]

    lost, dropped = strikes(seed)
    assert 60 < sum(lost) < 140
    assert [name for name, is_dropped in enumerate(dropped) if is_dropped] == [2, 5]
    assert strikes(seed) == (lost, dropped) != strikes(seed + 1)
