"""Every preset that ships can be run as it is, and as its own synchronous baseline."""

from pathlib import Path

import pytest

import configs.load
from configs.load import load_config

PRESETS = sorted((Path(configs.load.__file__).parent / "presets").iterdir())


def test_the_front_door_is_a_preset() -> None:
    assert "tiny-cpu.yaml" in [path.name for path in PRESETS]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_loads_and_bears_its_files_name(path: Path) -> None:
    assert load_config(path).name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_runs_synchronously_with_one_override(path: Path) -> None:
    assert load_config(path, ["pipeline.mode=sync"]).effective_max_staleness == 0


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_runs_with_two_generators_and_two_scorers(path: Path) -> None:
    config = load_config(path, ["generation.replicas=2", "scoring.replicas=2"])
    assert (config.generation.replicas, config.scoring.replicas) == (2, 2)


def test_make_smollm_puts_the_model_where_its_preset_looks() -> None:
    makefile = (Path(configs.load.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    (preset,) = [path for path in PRESETS if path.stem == "smollm2-cpu"]
    assert f"SMOLLM := {load_config(preset).model.path}\n" in makefile
