"""What a trainer keeps of its policy in a checkpoint, and how it, or whoever wants the policy, gets it back.

    model      every trained parameter             of a policy with adapters: those alone, and their factor
    optimizer  AdamW's state of each of them       <slot>.<parameter>; nothing before the first step
    rng        the state of torch's random numbers, that of rank 0

What adapters stand beside is the run's start model, which never changes: `load_weights` adds them to it.
"""

from collections.abc import Iterator, Mapping

import torch

from millrace.checkpointing.blocks import local
from millrace.checkpointing.names import MODEL, OPTIMIZER, RNG
from millrace.checkpointing.reading import StoredFiles, StoredTensors
from millrace.parallel.lora import merged
from storage.checkpoints import Checkpoint
from storage.store import Store

_STEP, _MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter: a number, and two tensors like the parameter."""
_CPU = "cpu"
"""Name of the CPU's random state."""
_SCALING = "lora_scaling"
"""Name of the factor alpha / rank among the parameters."""
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft calls an adapter's two matrices, in place of `.weight`."""

Parameters = Mapping[str, torch.nn.Parameter]
"""What is trained, by name: every parameter, or adapters."""


def policy_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer, lora_scaling: float | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint holds, by kind and name: the live tensors. `lora_scaling`: alpha / rank, of adapters."""
    trained = {name: parameter.detach() for name, parameter in parameters.items()}
    if lora_scaling is not None:
        trained[_SCALING] = torch.tensor(lora_scaling, dtype=torch.float64)
    slots = {
        f"{slot}.{name}": value
        for name, parameter in parameters.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }
    return {MODEL: trained, OPTIMIZER: slots, RNG: {_CPU: torch.get_rng_state()}}


@torch.no_grad()
def restore_policy_state(parameters: Parameters, optimizer: torch.optim.Optimizer, files: Mapping[str, bytes]) -> None:
    """Makes parameters, optimizer state and random numbers what a checkpoint's `files` hold, whoever wrote them.

    Each rank reads what it holds of them. Raises WeightsMismatch where the checkpoint is of another model, and
    StreamCorrupt; then nothing of this rank has changed.
    """
    weights = StoredTensors(files, MODEL).read(parameters)
    stored = StoredTensors(files, OPTIMIZER)
    # A checkpoint of version 0 was taken before the optimizer had any state.
    stepped = {name: parameter for name, parameter in parameters.items() if f"{_STEP}.{name}" in stored.shapes}
    moments = stored.read({f"{slot}.{name}": parameter for name, parameter in stepped.items() for slot in _MOMENTS})
    steps = stored.read({f"{_STEP}.{name}": torch.empty(()) for name in stepped})
    rng = StoredTensors(files, RNG).read_whole()[_CPU]
    for name, parameter in parameters.items():
        local(parameter).copy_(weights[name])
    optimizer.state.clear()
    for name, parameter in stepped.items():
        slots = {slot: torch.empty_like(parameter.detach()) for slot in _MOMENTS}
        for slot, tensor in slots.items():
            local(tensor).copy_(moments[f"{slot}.{name}"])
        optimizer.state[parameter] = {_STEP: steps[f"{_STEP}.{name}"], **slots}
    torch.set_rng_state(rng)


def load_weights(store: Store, checkpoint: Checkpoint, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The policy's parameters under the base model's names, whole, on the CPU, whichever ranks wrote the checkpoint.

    `start` are those of the run's start model: adapters are added to them, and what they don't stand beside is as it
    was. Raises StreamCorrupt, and KeyError where the adapters are of another model.
    """
    stored = StoredTensors(StoredFiles(store, checkpoint), MODEL).read_whole()
    scaling = stored.pop(_SCALING, None)
    if scaling is None:
        return stored
    return {**start, **dict(_merged(stored, start, scaling.item()))}


def _merged(
    adapters: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of each weight that has an adapter, what generators were given."""
    for name, down in adapters.items():
        if name.endswith(_DOWN):
            adapted = name.removesuffix(_DOWN)
            weight = f"{adapted}.weight"
            yield weight, merged(start[weight].detach().cpu(), down, adapters[adapted + _UP], scaling)
