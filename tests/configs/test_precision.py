"""`auto` is the number format that the machine is fast in."""

from pathlib import Path

import pytest

from configs import generation
from configs.generation import GenerationConfig, multiplies_bfloat16


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
