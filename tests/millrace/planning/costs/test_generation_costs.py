"""Generators: the roofline beside measured figures, and tables that are read at the corners of a grid."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.generation import Roofline
from millrace.planning.costs.hardware import HARDWARE, Hardware, hardware_named
from millrace.planning.costs.kernel_tables import KernelTable, with_tables
from millrace.planning.costs.known_models import MODELS, model_named

from millrace.errors import InputError

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
    found = roofline(name, dtype=dtype, tensor=tensor).decode(batch, batch * _HALF_WAY)
    assert found * 1000 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "tensor", "batch", "milliseconds"), _MEASURED)
def test_the_tables_are_what_nvidia_measured(
    name: str, dtype: str, tensor: int, batch: int, milliseconds: float
) -> None:
    pytest.importorskip("aiconfigurator_core")
    table = with_tables(roofline(name, dtype=dtype, tensor=tensor))
    assert table.source.startswith("aiconfigurator 0.")
    assert table.decode(batch, batch * _HALF_WAY) * 1000 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("hardware", "dtype"),
    [("h20", "bfloat16"), ("h100", "float32"), ("a100", "fp8")],
)
def test_without_a_table_it_is_the_roofline_and_says_so(hardware: str, dtype: str) -> None:
    own = roofline(hardware=hardware_named(hardware), dtype=dtype)
    assert with_tables(own) is own
    assert own.source == "roofline"


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["h100", "h200", "b200"])
@pytest.mark.parametrize(
    ("name", "tensor"), [("llama-8b", 1), ("qwen3-32b", 4), ("llama-70b", 8), ("qwen3-30b-a3b", 4)]
)
def test_roofline_and_tables_differ_by_two_fifths_at_most(hardware: str, name: str, tensor: int) -> None:
    pytest.importorskip("aiconfigurator_core")
    own = roofline(name, hardware_named(hardware), tensor=tensor)
    table = with_tables(own)
    assert table is not own
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


def test_a_table_asks_for_each_corner_once() -> None:
    engine = Linear()
    table = KernelTable(engine, "measured")
    for tokens in range(130 * 600, 130 * 700, 130):
        table.decode(130, tokens)
    assert engine.asked == 4


def test_prompts_are_computed_in_the_chunks_of_vllm() -> None:
    table = KernelTable(Linear(), "measured")
    assert table.prefill(0) == 0
    assert table.prefill(20_000) * 1000 == pytest.approx(3 * 2 + 0.05 * 20_000)


@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(MODELS)),
    hardware=st.sampled_from(sorted(HARDWARE)),
    running=st.integers(1, 2000),
    context=st.integers(1, 32_000),
    faster=st.floats(1, 10),
)
def test_more_work_takes_longer_and_a_better_machine_does_not(
    name: str, hardware: str, running: int, context: int, faster: float
) -> None:
    own = roofline(name, hardware_named(hardware), tensor=4)
    tokens = running * context
    seconds, prefill = own.decode(running, tokens), own.prefill(tokens)
    assert own.decode(running + 1, tokens + context) >= seconds
    assert own.decode(running, tokens + 1) >= seconds
    assert own.prefill(tokens + 1) >= prefill
    machine = own.hardware
    better = [
        replace(machine, memory_rate=machine.memory_rate * faster),
        replace(machine, nvlink=machine.nvlink * faster),
        replace(machine, flops={dtype: rate * faster for dtype, rate in machine.flops.items()}),
    ]
    for one in better:
        assert replace(own, hardware=one).decode(running, tokens) <= seconds
        assert replace(own, hardware=one).prefill(tokens) <= prefill


def test_a_small_batch_waits_for_the_weights() -> None:
    bare = replace(DEFAULTS, memory_share=1.0, layer_seconds=0.0)
    shape = model_named("llama-8b")
    seconds = roofline(assumptions=bare).decode(1, 0)
    # All parameters but the embeddings and the last norm, of which only a row is read.
    assert seconds == pytest.approx(2 * (shape.parameters - shape.vocabulary * shape.hidden - shape.hidden) / 3.35e12)


def test_more_gpus_than_key_value_heads_hold_no_less_of_the_cache() -> None:
    bare = replace(DEFAULTS, layer_seconds=0.0, nvlink_latency=0.0, network_latency=0.0)
    machine = replace(H100, nvlink=1e18, network=1e18)

    def cache(tensor: int) -> float:
        own = roofline(hardware=machine, tensor=tensor, assumptions=bare)
        return own.decode(1, 1_000_000) - own.decode(1, 0)

    assert cache(8) == pytest.approx(cache(1) / 8)
    assert cache(16) == pytest.approx(cache(8))


def test_hardware_without_figures_is_one_sentence() -> None:
    with pytest.raises(InputError) as refused:
        hardware_named("h300")
    assert str(refused.value) == (
        'there are no figures of the hardware "h300"; expected one of a100, h100, h200, b200, h20'
    )
