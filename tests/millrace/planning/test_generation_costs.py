"""Generators by the kernels that NVIDIA measured."""

import pytest

from millrace.errors import InputError, MissingExtra
from millrace.planning.generation import KernelTable
from millrace.planning.hardware import hardware_named
from millrace.planning.models import model_named

HALF_WAY = 128 + 1019 // 2


def table(name: str, *, dtype: str = "bfloat16", tensor: int = 1, hardware: str = "h100") -> KernelTable:
    return KernelTable(model_named(name), hardware_named(hardware), tensor=tensor, dtype=dtype, kv_dtype=dtype)


# Milliseconds per token of NVIDIA's aiconfigurator 0.12 for vLLM, 128 tokens in and 1,019 out; tokens in the cache are
# those half-way.
@pytest.mark.parametrize(
    ("name", "dtype", "tensor", "batch", "milliseconds"),
    [
        ("llama-8b", "bfloat16", 1, 128, 10.9),
        ("llama-70b", "bfloat16", 8, 128, 14.4),
        ("llama-405b", "fp8", 8, 64, 32.5),
        ("qwen3-30b-a3b", "bfloat16", 4, 128, 10.5),
    ],
)
def test_a_decode_step_takes_what_nvidia_measured(
    name: str, dtype: str, tensor: int, batch: int, milliseconds: float
) -> None:
    seconds = table(name, dtype=dtype, tensor=tensor).decode(batch, batch * HALF_WAY)
    assert seconds * 1000 == pytest.approx(milliseconds, rel=0.1)


def test_prompts_are_computed_in_chunks_and_float32_takes_twice_as_long() -> None:
    half, full = table("llama-8b"), table("llama-8b", dtype="float32")
    assert half.prefill(0) == 0
    assert half.prefill(5 * 8192) == pytest.approx(5 * half.prefill(8192))
    assert full.decode(64, 64_000) == pytest.approx(2 * half.decode(64, 64_000))
    assert "twice" in full.source


def test_more_work_takes_longer() -> None:
    generator = table("llama-8b")
    times = [generator.decode(running, 1000 * running) for running in (1, 3, 16, 100, 700)]
    assert times == sorted(times)
    assert generator.decode(64, 64 * 8000) > generator.decode(64, 64 * 1000)


def test_a_layout_without_figures_is_refused() -> None:
    with pytest.raises(InputError):
        table("qwen3-30b-a3b", tensor=16, hardware="a100")


def test_without_the_package_the_error_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.planning.generation.find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        table("llama-8b")
    assert caught.value.extra == "plan"
