"""A layout that a host or a model does not allow is refused before any process starts."""

from typing import Any

import pytest

from configs.training import ParallelConfig
from millrace.errors import InputError
from millrace.models.supported import FAMILIES
from millrace.preflight.parallel_layout import check_layout

LLAMA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("data", "tensor", "gpus"), [(1, 1, 1), (1, 1, None), (2, 4, 8), (3, 2, 8), (1, 4, None), (1000, 1, None)]
)
def test_what_fits_is_allowed(data: int, tensor: int, gpus: int | None) -> None:
    check_layout(LLAMA, ParallelConfig(data=data, tensor=tensor), gpus=gpus)


def test_hosts_share_the_ranks_and_each_has_gpus_of_its_own() -> None:
    check_layout(LLAMA, ParallelConfig(data=4, tensor=4), gpus=8, hosts=2)
    with pytest.raises(InputError, match=r"and each of 2 hosts has 7 GPUs; expected"):
        check_layout(LLAMA, ParallelConfig(data=4, tensor=4), gpus=7, hosts=2)


@pytest.mark.parametrize(("data", "tensor", "gpus"), [(9, 1, 8), (2, 4, 7), (1, 1, 0)])
def test_more_ranks_than_gpus_are_refused(data: int, tensor: int, gpus: int) -> None:
    layout = f"training.parallel.data is {data}, training.parallel.tensor is {tensor}"
    with pytest.raises(InputError, match=f"^{layout}, and this host has {gpus} GPUs; expected"):
        check_layout(LLAMA, ParallelConfig(data=data, tensor=tensor), gpus=gpus)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (LLAMA | {"num_attention_heads": 6}, "num_attention_heads is 6"),
        (LLAMA | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (LLAMA | {"intermediate_size": 22}, "intermediate_size is 22"),
    ],
)
def test_heads_and_features_that_can_not_be_divided_evenly_are_refused(model: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"^training.parallel.tensor is 4 and the model's {named}; expected"):
        check_layout(model, ParallelConfig(tensor=4), gpus=None)


def test_a_model_of_before_grouped_queries_has_as_many_keys_as_queries() -> None:
    old = {"num_attention_heads": 8, "intermediate_size": 24}
    check_layout(old, ParallelConfig(tensor=8), gpus=None)
    check_layout(old | {"num_key_value_heads": None}, ParallelConfig(tensor=8), gpus=None)


def test_a_model_of_another_kind_is_refused_by_what_its_config_lacks() -> None:
    with pytest.raises(InputError, match=r"the model's config\.json has no num_attention_heads; expected"):
        check_layout({"n_head": 12}, ParallelConfig(tensor=2), gpus=None)
    check_layout({"n_head": 12}, ParallelConfig(data=2), gpus=None)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.tensor_parallel])
def test_families_whose_layers_can_not_be_divided_are_refused_by_name(family: str) -> None:
    model = LLAMA | {"model_type": family}
    with pytest.raises(InputError) as caught:
        check_layout(model, ParallelConfig(tensor=2), gpus=None)
    assert str(caught.value) == (
        f"training.parallel.tensor is 2, and layers of a {family} model can't be divided among tensor ranks; "
        "expected 1 (docs/models.md)"
    )
    check_layout(model, ParallelConfig(data=2), gpus=None)
