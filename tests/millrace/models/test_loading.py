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


def test_a_whole_folder_has_the_values_of_its_files(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    parameters = dict(load_model(folder, "float32").named_parameters())
    assert held.keys() <= parameters.keys()
    assert all(parameters[name].equal(tensor) for name, tensor in held.items())


def drop_all(held: dict[str, torch.Tensor]) -> None:
    for name in [name for name in held if "layers.0" in name]:
        del held[name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("model.layers.0.mlp.down_proj.weight"), "miss model.layers.0.mlp.down_proj.weight"),
        # Of many, the first are named.
        (drop_all, " and 6 more"),
        (lambda held: held.update({"model.layers.0.spare": torch.zeros(2)}), "hold model.layers.0.spare"),
        (
            lambda held: held.update({"model.norm.weight": torch.zeros(3)}),
            "model.norm.weight is a tensor of the shape [3",
        ),
        (lambda held: held["model.norm.weight"][-1:].fill_(torch.nan), "model.norm.weight holds values that are not"),
    ],
)
def test_weight_files_that_do_not_fit_are_refused_with_the_tensor(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder, "float32")
    assert caught.value.file == str(folder)
    assert said in str(caught.value)


def test_one_value_that_is_not_finite_is_noticed() -> None:
    values = torch.zeros(1000, dtype=torch.bfloat16)
    assert is_finite(values)
    for bad in (torch.nan, torch.inf, -torch.inf):
        values[-1] = bad
        assert not is_finite(values)
