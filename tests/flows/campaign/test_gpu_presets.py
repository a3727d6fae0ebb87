"""Presets for GPUs on a host without one: the controller accepts them, and a host whose stages need GPUs refuses them.

Each has the config.json of its model, weight files of the right size without data, and a few rows of its data set.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.chat.tokenizers import FAMILIES, chat_tokenizer

from configs.load import PRESETS, load_config
from configs.schema import RunConfig
from configs.sources import key_in
from flows.campaign.prepare import check, check_on_host
from millrace.errors import InputError
from millrace.models.loading import empty_model
from millrace.planning.models import published_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")

NAMES = sorted(path.stem for path in PRESETS.glob("*gpu.yaml"))


def rows(first: int) -> pa.Table:
    """Questions in the columns of GSM8K and of MATH."""
    numbers = range(first, first + 600)
    questions = [f"What is {number} plus 1?" for number in numbers]
    return pa.table(
        {
            "question": questions,
            "answer": [f"Add one.\n#### {number + 1}" for number in numbers],
            "problem": questions,
            "solution": [f"It is $\\boxed{{{number + 1}}}$." for number in numbers],
        }
    )


def model_folder(folder: Path, name: str) -> None:
    """Writes the published config.json, a small tokenizer, and a weight file that takes no room on the disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published_config(name)))
    chat_tokenizer(FAMILIES["chatml"]).save_pretrained(folder)
    header, offset = {}, 0
    for tensor, parameter in empty_model(folder).named_parameters():
        end = offset + 2 * parameter.numel()
        header[tensor] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for model and data, on a host with room for any model."""
    monkeypatch.setattr("millrace.preflight.memory._memory", lambda: 1 << 50)
    monkeypatch.setattr("millrace.preflight.memory.shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 50))
    return tmp_path


def preset(site: Path, name: str, *settings: str) -> RunConfig:
    """The preset with its model and its data in `site`."""
    preset_file = PRESETS / f"{name}.yaml"
    config = load_config(preset_file)
    paths = {"model.path": config.model.path}
    model_folder(site / str(config.model.path), Path(str(config.model.path)).name)
    for source, of_source in config.by_source().items():
        for first, key in enumerate(("source", "eval_source")):
            path = getattr(of_source.prompts, key)
            paths[key_in(source, f"prompts.{key}")] = path
            file = site / str(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(rows(1000 * first), file)
    moved = [f"{key}={site / str(value)}" for key, value in paths.items()]
    return load_config(preset_file, [*moved, f"storage.root={site / 'runs'}", *settings])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_controller_without_a_gpu_accepts_each_preset(site: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.campaign.remote_stages.check_pools", lambda jobs: 1 / 0)
    pools = [f"placement.{stage}.work_pool=gpus" for stage in ("generate", "train", "evaluate")]
    config = preset(site, name, "placement.colocated=false", "pipeline.mode=async", *pools)
    # All checks before that of the pools have passed.
    with pytest.raises(ZeroDivisionError):
        check(config, name, resume="never")
    check_on_host(config, [("train", 0)], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-1.7b-1gpu", pytest.param("qwen3-8b-8gpu", marks=pytest.mark.extended)])
def test_a_host_without_a_gpu_refuses_a_preset_that_needs_it_here(site: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        check(preset(site, name), name, resume="never")
    assert caught.value.read.endswith("has none")
    assert not (site / "runs").exists()
