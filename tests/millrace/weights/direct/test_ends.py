"""All ends of `direct`, in one process: who gets what, what is refused, and how long it stays as it is."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.weights.direct import (
    Push,
    ShardedTrainer,
    assert_is,
    finder,
    id_of,
    layout_of,
    shards,
    tensors_of,
    trainer_layout,
    wait_until,
)

from millrace.errors import InputError, WeightsCorrupt
from millrace.weights.base import Manifest, Weights
from millrace.weights.direct.control import DirectRelay
from millrace.weights.direct.generator import DirectReader
from millrace.weights.direct.rendezvous import RendezvousClient
from millrace.weights.transfer.plan import TransferPlan

DEADLINE = 3.0


@pytest.fixture
def make_push(tmp_path: Path) -> Iterator[Callable[[int], Push]]:
    """`make(num_generators)`: trainer and sync_weights, found by all generators of this folder."""
    with ExitStack() as stack:

        def make(num_generators: int) -> Push:
            return stack.enter_context(closing(Push(tmp_path, num_generators, deadline_seconds=DEADLINE)))

        yield make


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[[int], DirectReader]]:
    """`make(generator)`: a generator's end in this process."""
    with ExitStack() as stack:

        def make(number: int) -> DirectReader:
            path = tmp_path / f"received-{number}"
            return stack.enter_context(closing(DirectReader(finder(tmp_path), number, path, deadline_seconds=DEADLINE)))

        yield make


def test_a_generator_that_never_came_is_missing_and_served_when_it_comes(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader]
) -> None:
    push, reader = make_push(2), make_reader(1)
    assert push.missing == {0, 1}
    push.offer(1)
    assert 0 in push.missing
    push.tend_until_missing({0})
    assert_is(reader.take(None), 1)
    late = make_reader(0)
    push.tend_until_missing(set())
    assert_is(late.take(None), 1)


def test_what_was_taken_stays_as_it_is_while_newer_versions_arrive_and_the_newest_is_taken_next(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader]
) -> None:
    push, reader = make_push(1), make_reader(0)
    push.deliver(1)
    taken = reader.take(None)
    for version in range(2, 8):
        push.deliver(version)
        assert_is(taken, 1)
    assert taken is not None
    assert_is(reader.take(taken.id), 7)


def test_what_is_not_newer_is_not_taken_though_it_came(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader]
) -> None:
    push, reader = make_push(1), make_reader(0)
    assert reader.take(id_of(5)) is None
    push.deliver(5)
    assert reader.take(id_of(5)) is None
    push.deliver(6)
    assert_is(reader.take(id_of(5)), 6)


def test_one_copy_of_the_model_per_generator_is_on_the_wire(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader]
) -> None:
    push = make_push(2)
    readers = [make_reader(0), make_reader(1)]
    push.deliver(1)
    before = push.relay.wire_bytes
    push.deliver(2)
    model = sum(tensor.nbytes for tensor in tensors_of(2).values())
    assert push.relay.wire_bytes - before == 2 * model
    sent = sum(rank.wire_bytes for rank in push.trainer.ranks) + sum(reader.wire_bytes for reader in readers)
    # Messages have gaps of up to 15 bytes between slices.
    assert 0 <= sent - push.relay.wire_bytes < 1000


def test_a_version_whose_ranks_disagree_about_a_tensor_that_both_hold_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"gamma": torch.tensor(2.0), "weight": torch.arange(6.0)}
    with (
        closing(DirectRelay(1, deadline_seconds=DEADLINE)) as relay,
        closing(ShardedTrainer(lambda: relay.address, layout_of(tensors, 2), deadline_seconds=DEADLINE)) as trainer,
    ):
        for rank, sender in enumerate(trainer.ranks):
            other = {**tensors, "gamma": torch.tensor(2.0 + rank)}
            parts = shards(other, layout_of(tensors, 2), rank)
            sender.offer(Weights(manifest=Manifest(id=id_of(1)), tensors=parts))

        def refused() -> bool:
            try:
                relay.take(None)
            except WeightsCorrupt as error:
                assert "trainer ranks hold different values of gamma" in str(error)
                return True
            return False

        wait_until(refused, "the disagreement is noticed")


def test_a_version_that_not_all_ranks_hold_is_not_sent(tmp_path: Path) -> None:
    layout = trainer_layout(2)
    with (
        closing(DirectRelay(1, deadline_seconds=DEADLINE)) as relay,
        closing(ShardedTrainer(lambda: relay.address, layout, deadline_seconds=DEADLINE)) as trainer,
    ):
        for version, ranks in ((1, (0, 1)), (2, (0,))):
            for rank in ranks:
                parts = shards(tensors_of(version), layout, rank)
                trainer.ranks[rank].offer(Weights(manifest=Manifest(id=id_of(version)), tensors=parts))
            if version == 1:
                wait_until(lambda: relay.take(None) is not None, "the first version is offered")
        wait_until(lambda: relay.take(None) is None, "rank 0 offers the second alone")


def test_a_version_that_is_damaged_in_a_rank_s_memory_is_asked_for_once_more(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader]
) -> None:
    push, reader = make_push(1), make_reader(0)
    push.deliver(1)
    assert_is(taken := reader.take(None), 1)
    assert taken is not None
    rank = push.trainer.ranks[1]
    summed = rank.between

    def damaged(client: RendezvousClient) -> None:
        before = rank._offered
        summed(client)
        if rank._offered is not before:
            rank._snapshot["head"].view(torch.int16)[0, 5] ^= 64

    rank.between = damaged  # type: ignore[method-assign]
    push.offer(2)
    assert push.missing == {0}
    rank.between = summed  # type: ignore[method-assign]
    with pytest.raises(WeightsCorrupt, match="version 2 received by direct are damaged: head"):
        reader.take(taken.id)
    with pytest.raises(WeightsCorrupt, match="head"):
        push.relay.check(taken)
    assert push.relay.ask_again()
    wait_until(push.trainer.ranks[0].is_wanted_again, "the trainer is asked")
    assert push.relay.take(None) is None
    push.newest = None
    push.deliver(2)
    assert not push.trainer.ranks[0].is_wanted_again()
    assert_is(reader.take(taken.id), 2)


@pytest.mark.slow
def test_a_generator_that_plans_otherwise_gets_nothing_and_is_named(
    make_push: Callable[[int], Push],
    make_reader: Callable[[int], DirectReader],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push, reader = make_push(1), make_reader(0)
    ours = reader._plans.plan

    def otherwise(source: Mapping[str, Any], generators: Sequence[Mapping[str, Any]]) -> TransferPlan:
        return dataclasses.replace(ours(source, generators), bucket_bytes=1 << 20)

    monkeypatch.setattr(reader._plans, "plan", otherwise)
    push.offer(1)
    assert push.missing == {0}
    assert reader.take(None) is None
    assert "generator/0 plans the transfer in another way than sync_weights" in capsys.readouterr().err
    monkeypatch.undo()
    push.tend_until_missing(set())
    assert_is(reader.take(None), 1)


def test_an_address_that_is_not_of_this_machine_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"weights\.host: can't listen at 192\.0\.2\.1; expected an address"):
        DirectRelay(1, host="192.0.2.1", deadline_seconds=DEADLINE)


def test_what_the_thread_can_not_deal_with_is_raised_by_take(tmp_path: Path) -> None:
    def find() -> str | None:
        raise PermissionError("the store says no")

    reader = DirectReader(find, 0, tmp_path / "received", deadline_seconds=DEADLINE)

    def raised() -> bool:
        try:
            reader.take(None)
        except PermissionError:
            return True
        return False

    wait_until(raised, "the thread's error")
    reader.close()


def test_all_find_the_successor_of_a_sync_weights_that_closed(
    make_push: Callable[[int], Push], make_reader: Callable[[int], DirectReader], tmp_path: Path
) -> None:
    push, reader = make_push(1), make_reader(0)
    push.deliver(1)
    assert_is(taken := reader.take(None), 1)
    assert taken is not None
    old, push.relay, push.newest = push.relay, DirectRelay(1, deadline_seconds=DEADLINE), None
    (tmp_path / "address").write_text(push.relay.address)
    old.close()
    assert reader.take(taken.id) is None
    push.deliver(2)
    assert_is(reader.take(taken.id), 2)
