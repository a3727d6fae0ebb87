"""`auto` is the number format that the machine is fast in."""

from pathlib import Path

import pytest

from configs import generation
from configs.generation import GenerationConfig, multiplies_bfloat16
from configs.load import PRESETS, changed_immutably, load_config
from configs.schema import RunConfig


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("flags : fpu avx2 avx512_bf16 amx_bf16", "amx_bf16"),
        ("Features : fp asimd bf16", "bf16"),
        ("flags : fpu avx2 avx512f", None),
        ("", None),
    ],
)
def test_a_cpu_multiplies_bfloat16_if_a_flag_says_so(tmp_path: Path, flags: str, expected: str | None) -> None:
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(flags)
    driver = tmp_path / "version"
    driver.touch()
    assert multiplies_bfloat16(cpu, tmp_path / "no driver") == expected
    assert multiplies_bfloat16(cpu, driver) == "GPU"


@pytest.mark.parametrize(("native", "expected"), [("amx_bf16", "bfloat16"), (None, "float32")])
def test_auto_is_resolved_when_the_config_is_read(
    monkeypatch: pytest.MonkeyPatch, native: str | None, expected: str
) -> None:
    monkeypatch.setattr(generation, "multiplies_bfloat16", lambda: native)
    config = GenerationConfig.model_validate({"dtype": "auto"})
    assert config.model_dump()["dtype"] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (None, None, "float32")),
        (["training.device=cuda"], ("bfloat16", True, "float32")),
        (["training.device=cuda", "generation.engine=vllm"], ("bfloat16", True, "bfloat16")),
        (
            ["training.device=cuda", "generation.engine=vllm", "generation.dtype=float32"],
            ("bfloat16", True, "float32"),
        ),
        (
            ["training.device=cuda", "training.compute_dtype=float32", "training.compile=false"],
            ("float32", False, "float32"),
        ),
    ],
)
def test_a_gpu_computes_in_bfloat16_unless_told_otherwise(overrides: list[str], expected: tuple[object, ...]) -> None:
    config = load_config(PRESETS / "tiny-cpu.yaml", overrides)
    assert (config.training.compute_dtype, config.training.compile, config.generation_dtype) == expected
    # As a run stores it.
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_resumed_run_keeps_the_number_format_on_another_device() -> None:
    on_gpu, on_cpu = (load_config(PRESETS / "tiny-cpu.yaml", [f"training.device={it}"]) for it in ("cuda", "cpu"))
    [change] = changed_immutably(on_gpu, on_cpu)
    assert change.startswith('training.compute_dtype was "bfloat16" and is null')
