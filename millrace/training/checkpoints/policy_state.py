"""The policy in a checkpoint: which tensors a trainer saves and restores, and how others load the weights.

    model      every trained parameter             with adapters: only theirs, and their factor; with frozen layers
                                                   their number
    optimizer  AdamW's state of each of them       <slot>.<parameter>; nothing before the first step
    rng        the state of torch's random numbers, rank 0's

Adapters, and the trained layers next to frozen ones, belong to the run's start model, which never changes:
`load_weights` combines them.
"""

from collections.abc import Mapping

import torch

from millrace.errors import InputError
from millrace.training.checkpoints.names import MODEL, OPTIMIZER, RNG
from millrace.training.checkpoints.reading import StoredFiles, StoredTensors
from millrace.training.optimizer import MOMENTS, empty_moment
from millrace.training.parallel.ranks import local
from millrace.weights.adapter import Adapter, merged, peft_names
from storage.checkpoints import Checkpoint
from storage.stores.base import BytesLike, Store

_STEP = "step"
"""AdamW's state of a parameter: this number, and two moments like the parameter."""
_CPU, _SCALING, _FROZEN = "cpu", "lora_scaling", "frozen_layers"
"""Names of the CPU's random state, and among the parameters of alpha / rank and of the number of frozen layers."""
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""peft's names of an adapter's two matrices, in place of `.weight`."""

Parameters = Mapping[str, torch.nn.Parameter]
"""The trained parameters by name: all that are not frozen, or those of the adapters."""


def policy_state(
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    lora_scaling: float | None = None,
    frozen_layers: int = 0,
) -> dict[str, dict[str, torch.Tensor]]:
    """The live tensors that a checkpoint holds, by kind and name. `lora_scaling` is alpha / rank of the adapters."""
    trained = {name: parameter.detach() for name, parameter in parameters.items()}
    if lora_scaling is not None:
        trained[_SCALING] = torch.tensor(lora_scaling, dtype=torch.float64)
    if frozen_layers:
        trained[_FROZEN] = torch.tensor(frozen_layers)
    slots = {
        f"{slot}.{name}": value
        for name, parameter in parameters.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }
    return {MODEL: trained, OPTIMIZER: slots, RNG: {_CPU: torch.get_rng_state()}}


@torch.no_grad()
def restore_policy_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer, files: Mapping[str, BytesLike], frozen_layers: int = 0
) -> None:
    """Restores parameters, optimizer state and random state from `files`, written by any number of ranks.

    Each rank reads its own part. Raises WeightsMismatch if the checkpoint belongs to another model, InputError if it
    has another number of frozen layers, and StreamCorrupt; then nothing on this rank has changed.
    """
    model = StoredTensors(files, MODEL)
    frozen = int(model.read({_FROZEN: torch.tensor(0)})[_FROZEN]) if _FROZEN in model.shapes else 0
    if frozen != frozen_layers:
        # Otherwise layers that the checkpoint's run trained would silently stay those of the start model.
        raise InputError(
            f"{frozen_layers}, but the checkpoint's run froze {frozen} layers",
            key="training.frozen_layers",
            expected=f"{frozen}, or a start from the start model",
        )
    weights = model.read(parameters)
    stored = StoredTensors(files, OPTIMIZER)
    # A checkpoint of version 0 has no optimizer state yet.
    stepped = {name: parameter for name, parameter in parameters.items() if f"{_STEP}.{name}" in stored.shapes}
    moments = stored.read({f"{slot}.{name}": parameter for name, parameter in stepped.items() for slot in MOMENTS})
    steps = stored.read({f"{_STEP}.{name}": torch.empty(()) for name in stepped})
    rng = StoredTensors(files, RNG).read_whole()[_CPU]
    for name, parameter in parameters.items():
        local(parameter.detach()).copy_(weights[name])
    optimizer.state.clear()
    for name, parameter in stepped.items():
        slots = {slot: empty_moment(optimizer, parameter.detach()) for slot in MOMENTS}
        for slot, tensor in slots.items():
            local(tensor).copy_(moments[f"{slot}.{name}"])
        step = steps[f"{_STEP}.{name}"]
        # A fused optimizer keeps it next to the parameter.
        optimizer.state[parameter] = {
            _STEP: step.to(parameter.device) if optimizer.defaults["fused"] else step,
            **slots,
        }
    torch.set_rng_state(rng)


@torch.no_grad()
def load_weights(store: Store, checkpoint: Checkpoint, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The policy's parameters by the base model's names, whole, on the CPU, written by any number of ranks.

    `start` are the parameters of the run's start model, on the CPU: they get the policy's values in place, adapters
    merged in, so that memory holds the model once. Without them new tensors are made, and adapters or frozen layers
    can't be loaded. Raises StreamCorrupt, and WeightsMismatch or KeyError if the checkpoint belongs to another model.
    """
    stored = StoredTensors(StoredFiles(store, checkpoint), MODEL)
    if _SCALING in stored.shapes:
        adapters = stored.read_whole()
        for name, down in adapters.items():
            if name.endswith(_DOWN):
                adapted = name.removesuffix(_DOWN)
                weight = start[f"{adapted}.weight"]
                # As generators were given them.
                weight.copy_(merged(weight, down, adapters[adapted + _UP], adapters[_SCALING].item()))
    elif _FROZEN in stored.shapes:
        trained = {name: start[name] for name in stored.shapes if name != _FROZEN}
        stored.read(trained, into=trained)
    elif start:
        stored.read(start, into=start)
    else:
        return stored.read_whole()
    return dict(start)


def load_adapter(store: Store, checkpoint: Checkpoint) -> tuple[Adapter, dict[str, torch.Tensor]] | None:
    """The adapter in a LoRA run's checkpoint and its A and B by PEFT's names, whole; None if other weights are trained.

    Raises StreamCorrupt.
    """
    stored = StoredTensors(StoredFiles(store, checkpoint), MODEL)
    if _SCALING not in stored.shapes:
        return None
    tensors = stored.read_whole()
    modules = [name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)]
    rank = len(tensors[modules[0] + _DOWN])
    adapter = Adapter(
        rank=rank,
        alpha=tensors[_SCALING].item() * rank,
        target_modules=tuple(sorted({module.rpartition(".")[2] for module in modules})),
        frozen_layers=int(tensors.get(_FROZEN, torch.tensor(0))),
    )
    by_peft_name: dict[str, torch.Tensor] = {}
    for module in modules:
        down, up = peft_names(module)
        by_peft_name |= {down: tensors[module + _DOWN], up: tensors[module + _UP]}
    return adapter, by_peft_name
