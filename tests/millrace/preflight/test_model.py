"""Models that can't be trained as a config asks: one sentence before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from millrace.errors import InputError
from millrace.models.supported import FAMILIES
from millrace.preflight.model import check_training, read_model

PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    """What is looked at of a model's folder."""
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"model_type": "gpt2"},
            "the trainer can't train a gpt2 model; expected one of " + ", ".join(FAMILIES) + " (docs/models.md)",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
            "the trainer can't train a phi3 model with rotary embeddings of type longrope, which differ with the "
            "length of the longest sequence of a batch; expected those of a fixed type (docs/models.md)",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "the trainer can't train a llama model with rotary embeddings of type dynamic, which differ with the "
            "length of the longest sequence of a batch; expected those of a fixed type (docs/models.md)",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "the trainer can't train a gemma3_text model with use_bidirectional_attention; expected one whose tokens "
            "attend to earlier ones only (docs/models.md)",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "the trainer can't train a gpt_oss model with quantized weights; expected a folder in float32 or bfloat16, "
            "without quantization_config (docs/models.md)",
        ),
    ],
    ids=["unknown family", "longrope", "dynamic", "bidirectional", "quantized"],
)
def test_a_model_that_the_trainer_does_not_know_is_refused(
    tmp_path: Path, model: dict[str, Any], sentence: str
) -> None:
    config = load_config(PRESET, [f"model.path={folder_of(tmp_path, model)}"])
    found = read_model(config.model)
    assert found == model
    with pytest.raises(InputError) as caught:
        check_training(found, config.training, on_this_host=True)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "training.router_replay=true",
            "training.router_replay is true and a llama model has no experts; expected false",
        ),
        (
            "training.router_aux_loss_coefficient=0.01",
            "training.router_aux_loss_coefficient is 0.01 and a llama model has no experts; expected 0",
        ),
    ],
)
def test_settings_for_experts_are_refused_where_there_are_none(tmp_path: Path, setting: str, said: str) -> None:
    folders = {kind: tmp_path / kind for kind in ("llama", "mixtral")}
    for kind, folder in folders.items():
        folder.mkdir()
        folder_of(folder, {"model_type": kind})
    config = load_config(PRESET, [f"model.path={folders['llama']}", setting])
    with pytest.raises(InputError) as caught:
        check_training(read_model(config.model), config.training, on_this_host=True)
    assert str(caught.value) == f"{said} (docs/models.md)"
    config = load_config(PRESET, [f"model.path={folders['mixtral']}", setting])
    check_training(read_model(config.model), config.training, on_this_host=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.frozen_layers=5"], "training.frozen_layers is 5 and the model has 4 layers; expected at most 4"),
        (
            ["training.frozen_layers=4", "training.lora.rank=8"],
            "training.frozen_layers is 4, the model has 4 layers and training.lora.rank is 8; expected fewer frozen "
            "layers, because adapters are in the others",
        ),
    ],
)
def test_more_frozen_layers_than_there_are_and_adapters_without_a_layer_are_refused(
    tmp_path: Path, settings: list[str], said: str
) -> None:
    folder = folder_of(tmp_path, {"model_type": "llama", "num_hidden_layers": 4})
    config = load_config(PRESET, [f"model.path={folder}", *settings])
    with pytest.raises(InputError) as caught:
        check_training(read_model(config.model), config.training, on_this_host=True)
    assert str(caught.value) == said
    allowed = [setting.replace("layers=5", "layers=4").replace("layers=4", "layers=3") for setting in settings]
    config = load_config(PRESET, [f"model.path={folder}", *allowed])
    check_training(read_model(config.model), config.training, on_this_host=True)


def test_the_layers_of_a_model_that_is_yet_to_be_made_are_known() -> None:
    config = load_config(PRESET, ["training.frozen_layers=4"])
    with pytest.raises(InputError, match=r"training.frozen_layers is 4 and the model has 3 layers; expected at most 3"):
        check_training(read_model(config.model), config.training, on_this_host=True)


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {
            "model_type": "gemma3_text",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear"},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ],
    ids=["windows", "a fixed scaling", "by kind of layer"],
)
def test_windows_and_fixed_rotary_embeddings_are_fine(tmp_path: Path, model: dict[str, Any]) -> None:
    config = load_config(PRESET, [f"model.path={folder_of(tmp_path, model)}"])
    check_training(read_model(config.model), config.training, on_this_host=True)
