"""All ends of `direct` in one process: delivery, refusals, and how long received memory stays unchanged."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from support.weights.direct import Pushes, ShardedTrainer, assert_is, finder, tensors_of, wait_until
from support.weights.direct_policies import POLICIES, id_of, layout_of, shards

from millrace.errors import InputError, WeightsCorrupt
from millrace.weights.base import Manifest, Weights
from millrace.weights.direct.receiver import DirectReceiver
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.rendezvous import Push, RendezvousClient
from millrace.weights.fingerprint import fingerprint

DEADLINE = 3.0
LAYOUT = POLICIES["odd"].layout(2)

MakeReceiver = Callable[[int], DirectReceiver]


@pytest.fixture
def pushes(tmp_path: Path) -> Iterator[Pushes]:
    """Trainer and sync_weights, for two generators of this folder."""
    with closing(Pushes(tmp_path, 2, deadline_seconds=DEADLINE)) as made:
        yield made


@pytest.fixture
def make_receiver(tmp_path: Path) -> Iterator[MakeReceiver]:
    """`make(generator)`: a generator's end in this process."""
    with ExitStack() as stack:

        def make(number: int) -> DirectReceiver:
            path = tmp_path / f"received-{number}"
            return stack.enter_context(
                closing(DirectReceiver(finder(tmp_path), number, path, deadline_seconds=DEADLINE))
            )

        yield make


def test_a_generator_that_never_came_is_missing_and_served_when_it_comes(
    pushes: Pushes, make_receiver: MakeReceiver
) -> None:
    receiver = make_receiver(1)
    assert pushes.relay.missing == {0, 1}
    pushes.push(1)
    pushes.retry_until_missing({0})
    assert_is(receiver.poll(None), 1)
    late = make_receiver(0)
    pushes.retry_until_missing(set())
    assert_is(late.poll(None), 1)


def test_a_received_version_is_unchanged_while_newer_ones_arrive(pushes: Pushes, make_receiver: MakeReceiver) -> None:
    receivers = [make_receiver(0), make_receiver(1)]
    pushes.deliver(1)
    received = receivers[0].poll(None)
    for version in range(2, 8):
        pushes.deliver(version)
        assert_is(received, 1)
    assert receivers[0].poll(id_of(7)) is None
    assert_is(receivers[1].poll(id_of(6)), 7)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
def test_shards_of_any_trainer_make_the_whole_model_at_each_generator(
    layout: tuple[int, int], make_receiver: MakeReceiver, tmp_path: Path
) -> None:
    policy = POLICIES["llama"]
    ranks = policy.layout(*layout)
    with closing(Pushes(tmp_path, 2, deadline_seconds=DEADLINE, layout=ranks)) as pushes:
        receivers = [make_receiver(0), make_receiver(1)]
        for version in range(1, 4):
            pushes.push(version, policy.tensors(version))
            pushes.retry_until_missing(set())
            for receiver in receivers:
                received = receiver.poll(id_of(version - 1))
                assert received is not None
                assert fingerprint(received.tensors) == fingerprint(policy.tensors(version))


def test_one_copy_of_the_model_per_generator_is_on_the_wire(pushes: Pushes, make_receiver: MakeReceiver) -> None:
    members = [*pushes.trainer.ranks, make_receiver(0), make_receiver(1)]
    pushes.deliver(1)
    before = sum(member.wire_bytes for member in members)
    pushes.deliver(2)
    model = sum(tensor.nbytes for tensor in tensors_of(2).values())
    # A generator counts its bytes after sending, and sync_weights does not wait for that.
    wait_until(lambda: sum(member.wire_bytes for member in members) - before == 2 * model, "the bytes are counted")


def test_ranks_that_disagree_about_a_shared_tensor_are_refused() -> None:
    tensors = {"gamma": torch.tensor(2.0), "weight": torch.arange(6.0)}
    layout = layout_of(tensors, 2)
    with (
        closing(DirectRelay(1, deadline_seconds=DEADLINE)) as relay,
        closing(ShardedTrainer(lambda: relay.address, layout, deadline_seconds=DEADLINE)) as trainer,
    ):
        for rank, sender in enumerate(trainer.ranks):
            parts = shards({**tensors, "gamma": torch.tensor(2.0 + rank)}, layout, rank)
            sender.publish(Weights(manifest=Manifest(id=id_of(1)), tensors=parts))

        def refused() -> bool:
            try:
                relay.poll(None)
            except WeightsCorrupt as error:
                assert str(error).endswith(" gamma")
                return True
            return False

        wait_until(refused, "the disagreement is noticed")


def test_a_version_that_not_all_ranks_hold_is_not_sent() -> None:
    with (
        closing(DirectRelay(1, deadline_seconds=DEADLINE)) as relay,
        closing(ShardedTrainer(lambda: relay.address, LAYOUT, deadline_seconds=DEADLINE)) as trainer,
    ):
        for version, ranks in ((1, (0, 1)), (2, (0,))):
            for rank in ranks:
                parts = shards(tensors_of(version), LAYOUT, rank)
                trainer.ranks[rank].publish(Weights(manifest=Manifest(id=id_of(version)), tensors=parts))
            if version == 1:
                wait_until(lambda: relay.poll(None) is not None, "the first version is offered")
        wait_until(lambda: relay.poll(None) is None, "rank 0 offers the second alone")


def test_a_version_damaged_in_a_ranks_memory_is_requested_again(pushes: Pushes, make_receiver: MakeReceiver) -> None:
    receivers = [make_receiver(0), make_receiver(1)]
    pushes.deliver(1)
    assert_is(received := receivers[0].poll(None), 1)
    assert received is not None
    rank = pushes.trainer.ranks[1]
    take_part = rank.take_part

    def damaged(client: RendezvousClient, push: Push) -> None:
        rank._snapshot.tensors["head"].view(torch.int16)[0, 5] ^= 64
        take_part(client, push)
        rank._snapshot.tensors["head"].view(torch.int16)[0, 5] ^= 64

    rank.take_part = damaged  # type: ignore[method-assign]
    pushes.push(2)
    assert pushes.relay.missing == {0, 1}
    rank.take_part = take_part  # type: ignore[method-assign]
    with pytest.raises(WeightsCorrupt, match=r"head$"):
        receivers[0].poll(received.id)
    with pytest.raises(WeightsCorrupt, match=r"head$"):
        pushes.relay.verify(received)
    pushes.relay.request_resend()
    wait_until(pushes.trainer.ranks[0].resend_requested, "the trainer is asked")
    assert pushes.relay.poll(None) is None
    pushes.newest = None
    pushes.deliver(2)
    assert not pushes.trainer.ranks[0].resend_requested()
    assert_is(receivers[0].poll(received.id), 2)


def test_an_address_that_is_not_of_this_machine_is_a_user_error() -> None:
    with pytest.raises(InputError):
        DirectRelay(1, host="192.0.2.1", deadline_seconds=DEADLINE)


def test_an_error_of_the_thread_is_raised_by_poll(tmp_path: Path) -> None:
    def find() -> str | None:
        raise PermissionError("the store says no")

    receiver = DirectReceiver(find, 0, tmp_path / "received", deadline_seconds=DEADLINE)

    def raised() -> bool:
        try:
            receiver.poll(None)
        except PermissionError:
            return True
        return False

    wait_until(raised, "the thread's error")
    receiver.close()


def test_all_find_the_successor_of_a_sync_weights_that_closed(
    pushes: Pushes, make_receiver: MakeReceiver, tmp_path: Path
) -> None:
    receivers = [make_receiver(0), make_receiver(1)]
    pushes.deliver(1)
    old, pushes.relay, pushes.newest = pushes.relay, DirectRelay(2, deadline_seconds=DEADLINE), None
    (tmp_path / "address").write_text(pushes.relay.address)
    old.close()
    assert_is(receivers[0].poll(None), 1)
    pushes.deliver(2)
    assert_is(receivers[0].poll(id_of(1)), 2)
