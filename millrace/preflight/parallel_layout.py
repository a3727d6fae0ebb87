"""Checks whether a model and a host allow the configured parallel layout, before any process starts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.errors import InputError
from millrace.models.supported import FAMILIES

if TYPE_CHECKING:
    from configs.training import ParallelConfig

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Keys of a model's config.json whose values tensor ranks divide among themselves."""


def check_layout(model: Mapping[str, Any], parallel: "ParallelConfig", *, gpus: int | None, hosts: int = 1) -> None:
    """Raises InputError if there are more ranks than GPUs, or tensor ranks don't divide a layer evenly.

    `model`: content of a model folder's config.json. `gpus`: GPUs of this host; None if the trainer runs on CPUs.
    `hosts`: number of hosts among which the data ranks are divided.
    """
    data, tensor = parallel.data, parallel.tensor
    if gpus is not None and data * tensor > gpus * hosts:
        raise InputError(
            f"training.parallel.data is {data}, training.parallel.tensor is {tensor}, and "
            f"{'this host has' if hosts == 1 else f'each of {hosts} hosts has'} {gpus} GPUs; "
            "expected data times tensor to be at most as many, for each rank needs one of its own"
        )
    if tensor == 1:
        return
    if (family := FAMILIES.get(model.get("model_type", ""))) is not None and not family.tensor_parallel:
        raise InputError(
            f"training.parallel.tensor is {tensor}, and layers of a {family.model_type} model can't be divided among "
            "tensor ranks; expected 1 (docs/models.md)"
        )
    sizes = {name: model.get(name) for name in _DIVIDED}
    # Without grouped-query attention there are as many key heads as query heads, and config.json may omit them.
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise InputError(
                f"training.parallel.tensor is {tensor} and the model's config.json has no {name}; "
                "expected a model of Llama's kind, or a tensor of 1"
            )
        if size % tensor:
            raise InputError(
                f"training.parallel.tensor is {tensor} and the model's {name} is {size}; expected tensor to divide it"
            )
