"""Generators: the roofline beside measured figures, and tables that are read at the corners of a grid."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.planning.generation import KernelTable, Roofline, with_tables
from millrace.planning.hardware import Hardware, hardware_named
from millrace.planning.models import model_named

H100 = hardware_named("h100")
# Milliseconds per token of NVIDIA's aiconfigurator 0.12 for vLLM, 128 tokens in and 1,019 out; tokens in the cache are
# those half-way.
_MEASURED = [
    ("llama-8b", "bfloat16", 1, 128, 10.9),
    ("llama-8b", "bfloat16", 8, 256, 5.2),
    ("llama-70b", "bfloat16", 8, 128, 14.4),
    ("llama-405b", "bfloat16", 16, 64, 71.7),
    ("llama-405b", "fp8", 8, 64, 32.5),
]
_HALF_WAY = 128 + 1019 // 2


def roofline(name: str = "llama-8b", hardware: Hardware = H100, **settings: object) -> Roofline:
    return replace(Roofline(shape=model_named(name), hardware=hardware), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dtype", "tensor", "batch", "milliseconds"), _MEASURED)
def test_the_roofline_is_within_a_tenth_of_what_nvidia_measured(
    name: str, dtype: str, tensor: int, batch: int, milliseconds: float
) -> None:
    seconds = roofline(name, dtype=dtype, tensor=tensor).decode(batch, batch * _HALF_WAY)
    assert seconds * 1000 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "tensor", "batch", "milliseconds"), _MEASURED)
def test_the_tables_are_what_nvidia_measured(
    name: str, dtype: str, tensor: int, batch: int, milliseconds: float
) -> None:
    pytest.importorskip("aiconfigurator_core")
    table = with_tables(roofline(name, dtype=dtype, tensor=tensor))
    assert table.source.startswith("aiconfigurator 0.")
    assert table.decode(batch, batch * _HALF_WAY) * 1000 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("hardware", "dtype"), [("h20", "bfloat16"), ("h100", "float32"), ("a100", "fp8")])
def test_without_a_table_it_is_the_roofline_and_says_so(hardware: str, dtype: str) -> None:
    own = roofline(hardware=hardware_named(hardware), dtype=dtype)
    assert with_tables(own) is own
    assert own.source == "roofline"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), [("llama-8b", 1), ("llama-70b", 8), ("qwen3-30b-a3b", 4)])
def test_roofline_and_tables_differ_by_two_fifths_at_most(name: str, tensor: int) -> None:
    pytest.importorskip("aiconfigurator_core")
    for hardware in ("h100", "h200", "b200"):
        own = roofline(name, hardware_named(hardware), tensor=tensor)
        table = with_tables(own)
        for batch in (16, 128, 512):
            for context in (638, 4096):
                ratio = own.decode(batch, batch * context) / table.decode(batch, batch * context)
                assert 0.75 < ratio < 1.4


class Linear:
    """An engine whose times are linear in requests and in tokens of each; counts its questions."""

    def __init__(self) -> None:
        self.asked = 0

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        self.asked += 1
        return 3 + 0.1 * bs + 0.01 * isl

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        self.asked += 1
        return 2 + 0.05 * bs * isl


@settings(max_examples=50)
@given(running=st.integers(1, 3000), context=st.integers(1, 60_000))
def test_between_the_corners_of_a_table_times_are_linear(running: int, context: int) -> None:
    table = KernelTable(Linear(), "measured")
    assert table.decode(running, running * context) * 1000 == pytest.approx(3 + 0.1 * running + 0.01 * context)


def test_a_table_asks_once_per_corner_and_computes_prompts_in_chunks() -> None:
    engine = Linear()
    table = KernelTable(engine, "measured")
    for tokens in range(130 * 600, 130 * 700, 130):
        table.decode(130, tokens)
    assert engine.asked == 4
    assert table.prefill(0) == 0
    assert table.prefill(20_000) * 1000 == pytest.approx(3 * 2 + 0.05 * 20_000)


@settings(max_examples=50)
@given(
    running=st.integers(1, 500),
    context=st.integers(1, 8000),
    tensor=st.sampled_from([1, 2, 8]),
    faster=st.floats(1, 10),
)
def test_more_work_takes_longer_and_a_better_machine_does_not(
    running: int, context: int, tensor: int, faster: float
) -> None:
    own, tokens = roofline(tensor=tensor), running * context
    seconds = own.decode(running, tokens)
    assert own.decode(running + 1, tokens) >= seconds
    assert own.decode(running, tokens + 1) >= seconds
    for better in (
        replace(H100, memory_rate=H100.memory_rate * faster),
        replace(H100, nvlink=H100.nvlink * faster),
        replace(H100, flops={dtype: rate * faster for dtype, rate in H100.flops.items()}),
    ):
        assert roofline(hardware=better, tensor=tensor).decode(running, tokens) <= seconds
