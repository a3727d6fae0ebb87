"""Models that can't be trained as a config asks: one sentence before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from millrace.errors import InputError
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
        ({"model_type": "gpt2"}, "the trainer can't train a gpt2 model; expected one of llama, mistral, qwen2, qwen3"),
        (
            {"model_type": "mistral", "sliding_window": 4096},
            "the trainer can't train a mistral model with sliding windows; expected one whose every layer attends to "
            "all tokens before",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "the trainer can't train a qwen3 model with sliding windows; expected one whose every layer attends to all "
            "tokens before",
        ),
    ],
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


@pytest.mark.parametrize("model", [{"model_type": "qwen2", "sliding_window": 4096}, {"model_type": "mistral"}])
def test_a_window_that_no_layer_uses_is_none(tmp_path: Path, model: dict[str, Any]) -> None:
    config = load_config(PRESET, [f"model.path={folder_of(tmp_path, model)}"])
    check_training(read_model(config.model), config.training, on_this_host=True)
