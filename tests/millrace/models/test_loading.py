"""A model folder is loaded as it is, or not at all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from millrace.errors import ModelFolderError
from millrace.models.loading import is_finite, load_model


@pytest.fixture
def folder(tmp_path: Path, make_model: Callable[..., LlamaForCausalLM]) -> Path:
    make_model().save_pretrained(tmp_path)
    return tmp_path


def without(folder: Path, *names: str) -> None:
    held = load_file(folder / "model.safetensors")
    for name in names:
        del held[name]
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_folder_has_the_values_of_its_files(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    parameters = dict(load_model(folder, "float32").named_parameters())
    assert held.keys() <= parameters.keys()
    assert all(parameters[name].equal(tensor) for name, tensor in held.items())


def test_a_parameter_that_is_in_no_file_is_named_rather_than_drawn(folder: Path) -> None:
    without(folder, "model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ModelFolderError, match=r"its weight files lack model.layers.0.mlp.down_proj.weight$"):
        load_model(folder, "float32")


def test_of_many_that_are_missing_the_first_are_named(folder: Path) -> None:
    names = sorted(name for name in load_file(folder / "model.safetensors") if "layers.0" in name)
    without(folder, *names)
    with pytest.raises(ModelFolderError, match=rf"lack {names[0]}, {names[1]}, {names[2]} and {len(names) - 3} more"):
        load_model(folder, "float32")


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tensor_that_the_model_does_not_have_is_named(folder: Path) -> None:
    changed(folder, lambda held: held.update({"model.layers.0.spare": torch.zeros(2)}))
    with pytest.raises(ModelFolderError, match=r"its weight files hold model.layers.0.spare, which the model that"):
        load_model(folder, "float32")


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    changed(folder, lambda held: held.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ModelFolderError, match=r"model.norm.weight has the shape \[3\] in the weight files, but the"):
        load_model(folder, "float32")


def test_values_that_are_not_finite_are_refused_whatever_the_size_of_the_folder(folder: Path) -> None:
    changed(folder, lambda held: held["model.norm.weight"][-1:].fill_(torch.nan))
    with pytest.raises(ModelFolderError, match=r"model.norm.weight holds values that are not finite"):
        load_model(folder, "float32")


def test_a_large_tensor_is_looked_at_to_its_end() -> None:
    values = torch.zeros((1 << 24) + 5, dtype=torch.bfloat16)
    assert is_finite(values)
    values[-1] = torch.inf
    assert not is_finite(values)
