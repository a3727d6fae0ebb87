"""Models that can't be trained as configured are refused before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.recipe import choose_recipe
from configs.training import ParallelConfig
from millrace.errors import InputError
from millrace.models.supported import FAMILIES
from millrace.preflight.model import check_layout, check_training, read_model

PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    """Write the files that the check reads."""
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def refusal(folder: Path, *settings: str) -> InputError:
    config = load_config(PRESET, [f"model.path={folder}", *settings])
    with pytest.raises(InputError) as caught:
        check_training(read_model(config.model, choose_recipe(config)), config.training)
    assert caught.value.expected
    return caught.value


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "quantized weights"),
    ],
    ids=["unknown family", "longrope", "dynamic", "bidirectional", "quantized"],
)
def test_a_model_that_the_trainer_does_not_know_is_refused(tmp_path: Path, model: dict[str, Any], part: str) -> None:
    config = load_config(PRESET, [f"model.path={folder_of(tmp_path, model)}"])
    assert read_model(config.model, choose_recipe(config)) == model
    with pytest.raises(InputError) as caught:
        check_training(model, config.training)
    assert part in caught.value.read


@pytest.mark.parametrize(
    ("setting", "expected"), [("router_replay=true", "false"), ("router_aux_loss_coefficient=0.01", "0")]
)
def test_settings_for_experts_are_refused_where_there_are_none(tmp_path: Path, setting: str, expected: str) -> None:
    folders = {kind: tmp_path / kind for kind in ("llama", "mixtral")}
    for kind, folder in folders.items():
        folder.mkdir()
        folder_of(folder, {"model_type": kind})
    mistake = refusal(folders["llama"], f"training.{setting}")
    assert mistake.key == f"training.{setting.partition('=')[0]}"
    assert (mistake.expected or "").startswith(expected)
    config = load_config(PRESET, [f"model.path={folders['mixtral']}", f"training.{setting}"])
    check_training(read_model(config.model, choose_recipe(config)), config.training)


@pytest.mark.parametrize(
    "settings", [["training.frozen_layers=5"], ["training.frozen_layers=4", "training.lora.rank=8"]]
)
def test_too_many_frozen_layers_are_refused(tmp_path: Path, settings: list[str]) -> None:
    folder = folder_of(tmp_path, {"model_type": "llama", "num_hidden_layers": 4})
    assert refusal(folder, *settings).key == "training.frozen_layers"
    allowed = [setting.replace("layers=5", "layers=4").replace("layers=4", "layers=3") for setting in settings]
    config = load_config(PRESET, [f"model.path={folder}", *allowed])
    check_training(read_model(config.model, choose_recipe(config)), config.training)


def test_the_layers_of_a_model_that_is_yet_to_be_made_are_known() -> None:
    config = load_config(PRESET, ["training.frozen_layers=4"])
    with pytest.raises(InputError) as caught:
        check_training(read_model(config.model, choose_recipe(config)), config.training)
    assert caught.value.key == "training.frozen_layers"
    assert "the model has 3 layers" in caught.value.read


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
    check_training(read_model(config.model, choose_recipe(config)), config.training)


# ---- layout of ranks ----

LLAMA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("data", "tensor", "gpus", "hosts"), [(1, 1, 1, 1), (2, 4, 8, 1), (3, 2, 8, 1), (1000, 4, None, 1), (4, 4, 8, 2)]
)
def test_a_layout_that_fits_is_allowed(data: int, tensor: int, gpus: int | None, hosts: int) -> None:
    check_layout(LLAMA, ParallelConfig(data=data, tensor=tensor), gpus=gpus, hosts=hosts)


@pytest.mark.parametrize(("data", "tensor", "gpus", "hosts"), [(9, 1, 8, 1), (2, 4, 7, 1), (1, 1, 0, 1), (4, 4, 7, 2)])
def test_more_ranks_than_gpus_are_refused(data: int, tensor: int, gpus: int, hosts: int) -> None:
    with pytest.raises(InputError) as caught:
        check_layout(LLAMA, ParallelConfig(data=data, tensor=tensor), gpus=gpus, hosts=hosts)
    assert caught.value.key == "training.parallel.data"
    assert caught.value.read.startswith(f"{data}, training.parallel.tensor is {tensor}")


FUSED = [name for name, family in FAMILIES.items() if not family.tensor_parallel]


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (LLAMA | {"num_attention_heads": 6}, "num_attention_heads is 6"),
        (LLAMA | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (LLAMA | {"intermediate_size": 22}, "intermediate_size is 22"),
        ({"n_head": 12}, "num_attention_heads"),
        *((LLAMA | {"model_type": name}, name) for name in FUSED),
    ],
)
def test_layers_that_tensor_ranks_can_not_divide_are_refused(model: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as caught:
        check_layout(model, ParallelConfig(tensor=4), gpus=None)
    assert caught.value.key == "training.parallel.tensor"
    assert part in caught.value.read
    check_layout(model, ParallelConfig(data=2), gpus=None)


def test_a_model_without_grouped_queries_has_as_many_keys_as_queries() -> None:
    old = {"num_attention_heads": 8, "intermediate_size": 24}
    check_layout(old, ParallelConfig(tensor=8), gpus=None)
    check_layout(old | {"num_key_value_heads": None}, ParallelConfig(tensor=8), gpus=None)
