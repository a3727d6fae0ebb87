"""Every element that a worker needs reaches it once, from a rank that has it, whatever the layouts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights.hops import Ranks, versions_of

from millrace.weights.transfer.generator_layouts import whole_layout
from millrace.weights.transfer.layout import Layout, Region, TensorSpec
from millrace.weights.transfer.plan import TransferPlan, plan_transfer
from millrace.weights.transfer.trainer_layouts import fsdp_layout

_DTYPES = ("float32", "bfloat16", "int8")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    """A few shapes, each of several tensors, as a model's layers have them."""
    specs = []
    for kind in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(_DTYPES))
        specs += [TensorSpec(f"{kind}.{layer}", dtype, shape) for layer in range(draw(st.integers(1, 4)))]
    return tuple(draw(st.permutations(specs)))


@st.composite
def trainers(draw: st.DrawFn, specs: tuple[TensorSpec, ...]) -> Layout:
    """FSDP over 1 to 4 data ranks, tensor parallelism over 1 to 3."""
    dims = {spec.name: draw(st.sampled_from([None, *range(min(len(spec.shape), 2))])) for spec in specs}
    return fsdp_layout(specs, data=draw(st.integers(1, 4)), tensor=draw(st.integers(1, 3)), tensor_dims=dims)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any box of a tensor, also one without elements."""
    return tuple(
        (begin, draw(st.integers(begin, extent))) for extent in shape for begin in [draw(st.integers(0, extent))]
    )


@st.composite
def generators(draw: st.DrawFn, specs: tuple[TensorSpec, ...]) -> list[Layout]:
    """Up to 5 generators of up to 3 layouts; what a worker needs is any box of each tensor, or nothing."""
    layouts = [whole_layout(specs)]
    for size in draw(st.lists(st.integers(1, 3), max_size=2)):
        held = [{spec.name: draw(boxes(spec.shape)) for spec in specs if draw(st.booleans())} for _ in range(size)]
        layouts.append(Layout.of(specs, held))
    return draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=5))


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    specs = draw(tensors())
    bucket = draw(st.sampled_from([16, 33, 64, 1000, 100_000]))
    alone = draw(st.sampled_from([None, 0, 20, 500]))
    return plan_transfer(draw(trainers(specs)), draw(generators(specs)), bucket_bytes=bucket, alone_bytes=alone)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_element_arrives_exactly_once_and_right(plan: TransferPlan) -> None:
    versions = versions_of(plan.source.tensors)
    ranks = Ranks(plan, versions)
    ranks.run()
    workers = [layout.held(worker) for layout in plan.generators for worker in range(layout.size)]
    for worker, needed in enumerate(workers):
        for name, box in needed.items():
            assert (ranks.writes[worker][name] == 1).all()
            whole = versions[name][tuple(slice(begin, end) for begin, end in box)]
            assert np.array_equal(ranks.staged[worker][name], whole)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_two_buckets_are_enough_and_bytes_are_as_planned(plan: TransferPlan) -> None:
    ranks = Ranks(plan, versions_of(plan.source.tensors))
    ranks.run()
    assert max(ranks.most_buckets.values(), default=0) <= 2
    assert [ranks.sent[rank] for rank in range(plan.size)] == plan.sent.tolist()
    assert [ranks.received[rank] for rank in range(plan.size)] == plan.received.tolist()
    needed = sum(layout.nbytes(worker) for layout in plan.generators for worker in range(layout.size))
    assert sum(plan.sent) == sum(plan.received) == needed


@settings(max_examples=80, deadline=None)
@given(plans())
def test_in_a_round_a_rank_sends_one_message_and_receives_one(plan: TransferPlan) -> None:
    for rank in range(plan.size):
        hops = plan.hops(rank)
        assert [hop.round for hop in hops] == sorted(hop.round for hop in hops)
        for ours in ([hop for hop in hops if hop.source == rank], [hop for hop in hops if hop.target == rank]):
            assert len({hop.round for hop in ours}) == len(ours)
    numbers = [hop.message.number for rank in range(plan.source.size) for hop in plan.hops(rank)]
    assert len(set(numbers)) == len(numbers)
