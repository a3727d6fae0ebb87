"""Every preset that ships can be run as it is, and as its own synchronous baseline."""

from pathlib import Path

import pytest

import configs.load
from configs.load import load_config

PRESETS = sorted((Path(configs.load.__file__).parent / "presets").iterdir())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_bears_its_files_name_and_scales_and_runs_synchronously(path: Path) -> None:
    config = load_config(path, ["pipeline.mode=sync", "generation.replicas=2", "scoring.replicas=2"])
    assert config.name == path.stem
    assert config.effective_max_staleness == 0


def test_make_smollm_puts_the_model_where_its_preset_looks() -> None:
    makefile = (Path(configs.load.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    (preset,) = [path for path in PRESETS if path.stem == "smollm2-cpu"]
    assert f"SMOLLM := {load_config(preset).model.path}\n" in makefile
