"""A policy that is divided among ranks learns as on a single rank.

The compared values were computed by torchrun's processes: see `support.training.sharded_trainers`.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training.sharded_trainers import (
    CASES,
    LAYOUTS,
    Case,
    Layout,
    Report,
    launch,
    make_trainer,
    samples,
    tiny_llama,
)

from millrace.errors import InputError
from millrace.training.parallel.ranks import ALONE, mesh_of_one
from millrace.training.parallel.sharding import base_tensors, shard
from millrace.training.parallel.tensor import split_layer
from millrace.training.policy import PackedPolicy

pytestmark = pytest.mark.slow

ReportOf = Callable[[int, tuple[str, ...]], Report]


IN_EACH_RUN = ("llama aipo float64", "qwen3 updates lora")
"""Cases that two ranks train in each run: all cases on all ranks take minutes, and are `extended`."""


def is_in_each_run(case: str, layout: Layout) -> bool:
    return layout.data * layout.tensor == 2 and case in (*IN_EACH_RUN, "flag")


def marked(case: str, layout: Layout) -> Any:
    marks = () if is_in_each_run(case, layout) else pytest.mark.extended
    return pytest.param(case, layout, id=f"{case} {layout}", marks=marks)


def spread(included: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Name and layout of each wanted case."""
    return [
        marked(name, layout)
        for layouts in LAYOUTS.values()
        for layout in layouts
        for name, case in CASES.items()
        if included(case) and case.runs_on(layout)
    ]


TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
"""Tolerance by the type of the computation. That of float32 is its rounding, as float64 shows."""
WEIGHTS_TOLERANCE = {"float32": 1e-4, "float64": 1e-13}
"""After three steps: AdamW takes a gradient that is hardly more than rounding as seriously as any other."""


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> ReportOf:
    """`report_of(2, tuple(CASES))`: of two ranks."""
    report: Path = tmp_path_factory.mktemp("ranks") / "report.json"
    return functools.cache(lambda ranks, cases: launch(ranks, report, cases=cases))


@pytest.fixture
def process_group() -> Iterator[None]:
    """Whatever group a test makes is gone after it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def found(report_of: ReportOf, case: str, layout: Layout) -> dict[str, Any]:
    cases = IN_EACH_RUN if is_in_each_run(case, layout) else tuple(CASES)
    return report_of(layout.data * layout.tensor, cases)[f"{case} {layout}"]


@pytest.mark.parametrize(
    ("case", "layout"), [marked("flag", layout) for layouts in LAYOUTS.values() for layout in layouts]
)
def test_a_flag_of_one_rank_is_known_to_all(report_of: ReportOf, case: str, layout: Layout) -> None:
    assert found(report_of, case, layout) == {"of the last rank": True, "of none": False}


@pytest.mark.parametrize(("case", "layout"), spread(lambda case: case.compute_dtype is None))
def test_ranks_train_to_the_losses_and_weights_of_one(report_of: ReportOf, case: str, layout: Layout) -> None:
    apart, kind = found(report_of, case, layout), str(CASES[case].dtype).removeprefix("torch.")
    assert apart["start"] == 0.0
    assert apart["gradient"] <= TOLERANCE[kind]
    assert apart["grad_norm"] <= TOLERANCE[kind]
    assert apart["loss"] <= TOLERANCE[kind]
    # Ratios of 50 and more are among these numbers.
    assert apart["report"] <= 100 * TOLERANCE[kind]
    assert apart["weights"] <= WEIGHTS_TOLERANCE[kind]
    assert apart["adapter"] <= WEIGHTS_TOLERANCE[kind]
    assert apart["next_logprobs"] <= TOLERANCE[kind]


@pytest.mark.parametrize(("case", "layout"), spread())
def test_a_rank_holds_blocks_of_the_weights_where_dtensor_says(report_of: ReportOf, case: str, layout: Layout) -> None:
    this = found(report_of, case, layout)
    assert this["misplaced_blocks"] == []
    # Rank 0's: the larger part where something is not divided evenly. Embeddings and norms are whole in each row.
    assert this["elements_held"] < this["elements"] * (1.1 if layout.tensor == 1 else 1.6) / (
        (layout.shard or layout.data) * layout.tensor
    )


@pytest.mark.parametrize(("case", "layout"), spread())
def test_every_rank_hands_over_its_box_of_the_whole(report_of: ReportOf, case: str, layout: Layout) -> None:
    # Products of parts of A and B are rounded in another order than those of the whole.
    assert found(report_of, case, layout)["shards_apart"] <= (1e-7 if CASES[case].lora else 0.0)


@pytest.mark.parametrize(("case", "layout"), spread(lambda case: case.lora))
def test_with_adapters_only_they_learn_and_what_goes_out_is_merged(
    report_of: ReportOf, case: str, layout: Layout
) -> None:
    this = found(report_of, case, layout)
    assert len(this["moved"]) == 2 * len(["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    assert all(
        name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight"))
        for name in this["moved"]
    )
    assert this["with_optimizer_state"] == this["trained"] == 2 * len(this["moved"])


@pytest.mark.parametrize(("case", "layout"), spread(lambda case: case.compute_dtype is not None))
def test_bfloat16_is_only_for_passes_through_the_layers(report_of: ReportOf, case: str, layout: Layout) -> None:
    this = found(report_of, case, layout)
    assert this["weights_dtype"] == this["gradient_dtype"] == ["torch.float32"]
    # A layer's output has three significant digits.
    assert 1e-4 < this["gradient"] < 0.1
    assert 1e-5 < this["loss"] < 0.05


@pytest.mark.usefixtures("process_group")
def test_one_rank_computes_in_bfloat16_and_learns_in_float32() -> None:
    case = CASES["llama aipo bfloat16"]
    alone, mixed = make_trainer(case, ALONE, None), make_trainer(case, ALONE, "bfloat16")
    start = {name: tensor.clone() for name, tensor in base_tensors(mixed.model, whole=True)}
    expected, report = alone.step(samples(7, seed=0)), mixed.step(samples(7, seed=0))
    assert report.loss != expected.loss
    assert report.loss == pytest.approx(expected.loss, abs=0.05)
    for name, tensor in base_tensors(mixed.model, whole=True):
        assert tensor.dtype == torch.float32, name
        # AdamW's first step is one learning rate for each element; a bfloat16 of 1 would not move at all.
        moved = (tensor - start[name]).abs().max().item()
        assert moved == pytest.approx(1e-3, rel=0.05), name


def test_a_policy_that_is_alone_in_its_own_type_is_left_as_it_is() -> None:
    policy = PackedPolicy(tiny_llama())
    before = dict(policy.model.named_parameters())
    shard(policy, ALONE, compute_dtype=torch.float32)
    assert {name: id(tensor) for name, tensor in policy.model.named_parameters()} == {
        name: id(tensor) for name, tensor in before.items()
    }
    assert all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in base_tensors(policy.model, whole=True))


@pytest.mark.usefixtures("process_group")
def test_a_module_that_the_plan_does_not_know_is_named() -> None:
    layer = tiny_llama().base_model.get_submodule("layers.0")
    layer.get_submodule("mlp").router = torch.nn.Linear(32, 8)
    with pytest.raises(InputError, match=r"^model\.layers\.0\.mlp\.router, a Linear, can't be divided among tensor"):
        split_layer(layer, "model.layers.0", mesh_of_one(torch.device("cpu"))["tensor"])


@pytest.mark.usefixtures("process_group")
def test_norms_of_all_heads_together_can_not_be_divided() -> None:
    layer = tiny_llama().base_model.get_submodule("layers.0")
    layer.get_submodule("self_attn").q_norm = torch.nn.RMSNorm(32)
    with pytest.raises(InputError, match=r"^model\.layers\.0\.self_attn\.q_norm has weights for 32 features"):
        split_layer(layer, "model.layers.0", mesh_of_one(torch.device("cpu"))["tensor"])
