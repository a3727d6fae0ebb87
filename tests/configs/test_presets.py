"""Every preset that ships can be run as it is, and as its own synchronous baseline."""

from pathlib import Path

import pytest

import configs.load
from configs.load import load_config
from millrace.planning.gpus import GpuMachine, num_gpus
from millrace.planning.hardware import hardware_named
from millrace.planning.models import model_named, published_config
from millrace.preflight.model import check_layout, check_training

PRESETS = sorted((Path(configs.load.__file__).parent / "presets").iterdir())
GPU_PRESETS = [path for path in PRESETS if path.stem.endswith("gpu")]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_bears_its_files_name_and_scales_and_runs_synchronously(path: Path) -> None:
    config = load_config(path, ["pipeline.mode=sync", "generation.replicas=2", "scoring.replicas=2"])
    assert config.name == path.stem
    assert config.effective_max_staleness == 0


def test_make_smollm_puts_the_model_where_its_preset_looks() -> None:
    makefile = (Path(configs.load.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    (preset,) = [path for path in PRESETS if path.stem == "smollm2-cpu"]
    assert f"SMOLLM := {load_config(preset).model.path}\n" in makefile


@pytest.mark.parametrize("path", GPU_PRESETS, ids=lambda path: path.name)
def test_a_gpu_preset_fits_its_gpus_and_its_model_can_be_divided(path: Path) -> None:
    config, hardware = load_config(path), hardware_named("h100")
    # Commands in the preset get its model into a folder of this name.
    name, hosts = Path(config.model.path or "").name, config.placement.train.hosts
    check_training(published_config(name), config.training)
    check_layout(published_config(name), config.training.parallel, gpus=hardware.gpus_per_host, hosts=hosts)
    memory = GpuMachine(shape=model_named(name), hardware=hardware).memory(config)
    assert memory.fits, memory.sentence
    count = num_gpus(config)
    assert path.stem.endswith(f"-{count}gpu") or (path.stem.endswith("-gpu") and count == 1)


@pytest.mark.parametrize("path", GPU_PRESETS, ids=lambda path: path.name)
def test_a_gpu_preset_says_how_to_get_its_model_and_its_data(path: Path) -> None:
    text, config = path.read_text(encoding="utf-8"), load_config(path)
    folders = [line.split("--local-dir ")[1] for line in text.splitlines() if line.startswith("#        hf download ")]
    model, *data = folders
    assert model == config.model.path
    for folder, source in zip(data, config.by_source().values(), strict=True):
        assert folder == "/".join(source.prompts.source.split("/")[:2])
        assert source.prompts.eval_source is not None
        assert source.prompts.eval_source.startswith(folder)
    assert f"millrace plan configs/presets/{path.name} " in text
