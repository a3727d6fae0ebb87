"""Traces made by hand, in which the time of each category is known."""

from typing import Any

import pytest

from millrace.profiling.breakdown import (
    ATTENTION,
    COPIES,
    GEMM,
    OPTIMIZER,
    OTHER,
    PYTHON,
    Breakdown,
    break_down,
    operations,
)
from millrace.profiling.trace import WAITING, Event, Trace

MAIN, BACKWARD = 7, 8


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = MAIN, **arguments: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def seconds_of(*events: Event, start: float = 0, end: float = 100e6) -> Breakdown:
    trace = Trace(
        process="train-0", thread=MAIN, threads=1, dtype="float32", start=start, end=end, num_steps=1,
        events=[{"ph": "M", "name": "process_name"}, *events],
    )  # fmt: skip
    return break_down(trace, start, end)


def test_a_moment_belongs_to_the_innermost_operator() -> None:
    result = seconds_of(
        event("aten::linear", 10e6, 20e6),
        event("aten::addmm", 12e6, 10e6),
        event("aten::copy_", 14e6, 3e6),
        event("aten::mul", 40e6, 5e6),
    )
    assert result.device == "cpu"
    assert result.seconds == pytest.approx(
        {GEMM: 17, ATTENTION: 0, OTHER: 5, OPTIMIZER: 0, COPIES: 3, PYTHON: 75, WAITING: 0}
    )


def test_operators_of_the_optimizer_and_of_attention_belong_to_it() -> None:
    result = seconds_of(
        event("Optimizer.step#AdamW.step", 0, 30e6, "user_annotation"),
        event("aten::mul", 5e6, 10e6),
        event("aten::scaled_dot_product_attention", 40e6, 10e6),
        event("aten::bmm", 42e6, 4e6),
    )
    assert (result.seconds[OPTIMIZER], result.seconds[ATTENTION], result.seconds[GEMM]) == (10, 10, 0)
    # The rest of the annotation ran no operator.
    assert result.seconds[PYTHON] == pytest.approx(80)


def test_time_without_operators_is_waiting_or_python() -> None:
    result = seconds_of(event("aten::mul", 30e6, 10e6), event("waiting for scored groups", 20e6, 40e6, WAITING, tid=0))
    assert (result.seconds[WAITING], result.seconds[PYTHON]) == pytest.approx((30, 60))


def test_only_the_window_and_the_main_thread_count() -> None:
    result = seconds_of(event("aten::mm", 0, 30e6), event("aten::mul", 50e6, 20e6, tid=BACKWARD), start=20e6, end=60e6)
    assert sum(result.seconds.values()) == pytest.approx(40)
    assert (result.seconds[GEMM], result.seconds[OTHER]) == pytest.approx((10, 0))


def test_a_kernel_has_the_category_of_the_operator_that_launched_it() -> None:
    launch = {"External id": 3}
    result = seconds_of(
        event("AddmmBackward0", 0, 50e6, tid=BACKWARD),
        event("aten::mm", 1e6, 2e6, tid=BACKWARD, **launch),
        event("sm90_some_name", 10e6, 20e6, "kernel", tid=0, **launch),
        event("Memcpy HtoD", 25e6, 10e6, "gpu_memcpy", tid=1),
        event("vectorized_elementwise_kernel", 60e6, 5e6, "kernel", tid=0),
    )
    assert result.device == "cuda"
    # The copy overlaps the product for five seconds, which count for the product.
    assert (result.seconds[GEMM], result.seconds[COPIES], result.seconds[OTHER]) == (20, 5, 5)
    assert sum(result.seconds.values()) == pytest.approx(100)


@pytest.mark.parametrize(
    ("name", "dims", "inputs", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], [], 60),
        ("aten::bmm", [[4, 2, 3], [4, 3, 5]], [], 240),
        ("aten::addmm", [[5], [2, 3], [3, 5]], [], 60),
        # Its weight is as nn.Linear stores it.
        ("mkldnn::_linear_pointwise", [[2, 1, 3], [5, 3], [5]], [], 60),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 3, 4]] * 3, ["False"], 288),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 3, 4]] * 3, ["True"], 144),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [[1, 2, 3, 4]] * 5, ["True"], 360),
        ("aten::mul", [[2, 3], [2, 3]], [], 0),
        ("aten::mm", [], [], 0),
    ],
)
def test_operations_follow_from_shapes(name: str, dims: list[list[int]], inputs: list[str], expected: float) -> None:
    assert operations(name, {"Input Dims": dims, "Concrete Inputs": inputs}) == expected


def test_operations_count_for_the_category_in_the_window() -> None:
    shapes = {"Input Dims": [[2, 3], [3, 5]]}
    result = seconds_of(event("aten::mm", 10e6, 1e6, **shapes), event("aten::mm", 200e6, 1e6, **shapes))
    assert result.flops == {GEMM: 60}
