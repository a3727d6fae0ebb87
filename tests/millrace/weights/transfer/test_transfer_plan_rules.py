"""Who is chosen, what a digest covers, and what can't be planned."""

from dataclasses import replace

import numpy as np
import pytest
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.model_shape import tensor_dims

from millrace.errors import WeightsMismatch
from millrace.weights.transfer.generator_layouts import vllm_layout, whole_layout
from millrace.weights.transfer.layout import Layout, Region, TensorSpec
from millrace.weights.transfer.plan import TransferPlan, plan_transfer
from millrace.weights.transfer.trainer_layouts import fsdp_layout

SPECS = tuple(TensorSpec(name, "float32", (8, 4)) for name in ("a", "b", "c", "d"))


def _plan(source: Layout, *generators: Layout, bucket_bytes: int = 64) -> TransferPlan:
    return plan_transfer(source, generators, bucket_bytes=bucket_bytes)


def _halves(name: str) -> list[dict[str, Region]]:
    return [{name: ((0, 4), (0, 4))}, {name: ((4, 8), (0, 4))}]


def test_processes_that_plan_from_json_agree() -> None:
    source = fsdp_layout(SPECS, data=3, tensor=2, tensor_dims={"a": 1})
    plan = _plan(source, whole_layout(SPECS), whole_layout(SPECS))
    other = _plan(
        Layout.from_json(source.to_json()), *(Layout.from_json(layout.to_json()) for layout in plan.generators)
    )
    assert other.digest == plan.digest
    assert [other.hops(rank) for rank in range(other.size)] == [plan.hops(rank) for rank in range(plan.size)]


def test_a_digest_differs_if_anything_differs() -> None:
    source, whole = fsdp_layout(SPECS, data=2), whole_layout(SPECS)
    specs = {
        "name": (*SPECS[:3], TensorSpec("e", "float32", (8, 4))),
        "dtype": (*SPECS[:3], TensorSpec("d", "bfloat16", (8, 4))),
        "shape": (*SPECS[:3], TensorSpec("d", "float32", (4, 8))),
        "order": SPECS[::-1],
    }
    plans = {
        "base": _plan(source, whole),
        "bucket": _plan(source, whole, bucket_bytes=128),
        "alone": plan_transfer(source, [whole], bucket_bytes=64, alone_bytes=20),
        "generators": _plan(source, whole, whole),
        "trainer ranks": _plan(fsdp_layout(SPECS, data=4), whole),
        "tensor parallel": _plan(fsdp_layout(SPECS, data=1, tensor=2, tensor_dims={"a": 1}), whole),
        "box": _plan(fsdp_layout(SPECS, data=1, tensor=2, tensor_dims={"b": 1}), whole),
        "part": _plan(source, Layout.of(SPECS, [{"a": ((0, 8), (0, 4))}])),
        "workers": _plan(source, Layout.of(SPECS, [{"a": ((0, 8), (0, 4))}, {}])),
        **{name: _plan(fsdp_layout(changed, data=2), whole_layout(changed)) for name, changed in specs.items()},
    }
    assert len({plan.digest for plan in plans.values()}) == len(plans)


def test_the_order_of_different_generators_is_part_of_the_digest() -> None:
    source, whole, part = fsdp_layout(SPECS, data=2), whole_layout(SPECS), Layout.of(SPECS, _halves("a"))
    assert len({_plan(source, *layouts).digest for layouts in ([whole, part], [part, whole], [whole, part, part])}) == 3


def test_holders_of_the_same_large_regions_share_the_work() -> None:
    specs = [TensorSpec(f"{index}", "float32", (64, 16)) for index in range(2)]
    plan = _plan(fsdp_layout(specs, data=1, tensor=4), whole_layout(specs), bucket_bytes=256)
    assert plan.sent[:4].tolist() == [2 * 64 * 16 * 4 // 4] * 4


def test_holders_of_the_same_small_tensors_take_turns() -> None:
    specs = [TensorSpec(f"{index}", "float32", (4,)) for index in range(40)]
    plan = _plan(fsdp_layout(specs, data=1, tensor=4), whole_layout(specs), bucket_bytes=1 << 20)
    assert plan.sent[:4].tolist() == [160] * 4
    slices = [one for hop in plan.hops(4) for one in hop.message.slices]
    assert len(slices) == 40, "a small tensor was cut"


def test_one_trainer_rank_sends_one_copy_and_generators_hand_it_on() -> None:
    plan = _plan(fsdp_layout(SPECS, data=1), *[whole_layout(SPECS)] * 3)
    nbytes = plan.source.nbytes(0)
    assert plan.sent.tolist() == [nbytes, nbytes, nbytes, 0]
    assert plan.received.tolist() == [0, nbytes, nbytes, nbytes]


def test_many_trainer_ranks_send_several_copies() -> None:
    plan = _plan(fsdp_layout(SPECS, data=8), *[whole_layout(SPECS)] * 4, bucket_bytes=16)
    assert len(plan.families[0].chains) == 2
    assert sum(plan.sent[:8]) == 2 * sum(plan.source.nbytes(rank) for rank in range(8))


def test_generators_of_different_layouts_hand_nothing_to_each_other() -> None:
    whole, part = whole_layout(SPECS), Layout.of(SPECS, _halves("a"))
    plan = _plan(fsdp_layout(SPECS, data=1), whole, part, whole, part)
    assert [family.chains for family in plan.families] == [((0, 2),), ((1, 3),)]
    targets = {(hop.source, hop.target) for rank in range(plan.size) for hop in plan.hops(rank)}
    assert targets == {(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6)}


def test_without_generators_nothing_is_sent() -> None:
    plan = _plan(fsdp_layout(SPECS, data=2))
    assert (plan.hops(0), plan.sent.tolist(), plan.sent_balance) == ([], [0, 0], 1.0)


def test_the_largest_llama_is_balanced_over_a_thousand_ranks() -> None:
    specs = model_named("llama-405b").tensors()
    source = fsdp_layout(specs, data=128, tensor=8, tensor_dims=tensor_dims(specs))
    generator = vllm_layout(specs, tensor=16, num_heads=128, num_kv_heads=8)
    plan = _plan(source, *[generator] * 128, bucket_bytes=64 << 20)
    assert plan.size == 1024 + 128 * 16
    assert sum(plan.received) == 128 * sum(generator.nbytes(worker) for worker in range(16))
    assert max(plan.sent_balance, plan.received_balance) <= 1.1


@pytest.mark.parametrize(
    ("needed", "sentence"),
    [
        (SPECS[:3], "the trainer has d and generator 1 has not"),
        ((*SPECS, TensorSpec("e", "float32", ())), "generator 1 has e and the trainer has not"),
        (
            (*SPECS[:3], replace(SPECS[3], dtype="int8")),
            r"generator 1 has d as int8 \[8, 4\]; expected float32 \[8, 4\]",
        ),
        ((*SPECS[:3], replace(SPECS[3], shape=(8,))), r"generator 1 has d as float32 \[8\]; expected float32 \[8, 4\]"),
    ],
)
def test_a_generator_of_another_model_is_named(needed: tuple[TensorSpec, ...], sentence: str) -> None:
    with pytest.raises(WeightsMismatch, match=sentence):
        _plan(fsdp_layout(SPECS, data=2), whole_layout(SPECS), whole_layout(needed))


def test_a_trainer_that_lacks_rows_is_refused() -> None:
    source = Layout.of(SPECS[:1], [{"a": ((0, 4), (0, 4))}, {"a": ((5, 8), (0, 4))}])
    with pytest.raises(
        WeightsMismatch, match="generator 0 can't be served: a is not held whole by the trainer's ranks"
    ):
        _plan(source, whole_layout(SPECS[:1]))
    assert _plan(source, Layout.of(SPECS[:1], [{"a": ((5, 7), (0, 4))}])).received.tolist() == [0, 0, 32]


def test_boxes_that_overlap_partly_are_refused() -> None:
    source = Layout.of(SPECS[:1], [{"a": ((0, 8), (0, 1))}, {"a": ((0, 5), (1, 4))}, {"a": ((4, 8), (1, 4))}])
    with pytest.raises(WeightsMismatch, match="a is held by ranks 1 and 2 in boxes that overlap only partly"):
        _plan(source, whole_layout(SPECS[:1]))


def test_a_bucket_has_room_for_any_element() -> None:
    with pytest.raises(ValueError, match="buckets of 15 bytes; expected at least 16"):
        _plan(fsdp_layout(SPECS, data=1), whole_layout(SPECS), bucket_bytes=15)


def test_planning_twice_gives_the_same_hops() -> None:
    source = fsdp_layout(SPECS, data=3, tensor=2, tensor_dims={"a": 0, "b": 1})
    plans = [_plan(source, *[whole_layout(SPECS)] * 3) for _ in range(2)]
    assert plans[0].hops(7) == plans[1].hops(7) != []
    assert np.array_equal(plans[0].sent, plans[1].sent)
