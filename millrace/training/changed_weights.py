"""The share of the trained weights that a step changed, in the number format that generators receive.

An update that is smaller than the format's precision reaches no generator: at a learning rate of 1e-6, a step changes
about one bfloat16 in a hundred. A sample of the weights before and after the step is compared.
"""

import torch
from transformers import PreTrainedModel

from millrace.training.parallel.lora import adapters, base_name, is_adapter
from millrace.training.parallel.ranks import Ranks
from millrace.training.parallel.sharding import own_shards

_SAMPLE = 1 << 20
"""Weights that each rank looks at: enough for a share of 0.1 % to be within a tenth, and no cost next to a step."""


@torch.no_grad()
def sample_weights(model: PreTrainedModel, dtype: torch.dtype) -> torch.Tensor:
    """[n] copies of evenly spaced weights that training changes, in `dtype`, of this rank; adapters are merged in.

    Every rank has to call this.
    """
    changing = {base_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    changing = {name for name in changing if not is_adapter(name)} | {base_name(name) for name in adapters(model)}
    sizes = [parameter.numel() for name, parameter in model.named_parameters() if base_name(name) in changing]
    spacing = max(1, sum(sizes) // _SAMPLE)
    parts = [part.reshape(-1)[::spacing].to(dtype) for name, part in own_shards(model) if name in changing]
    # Off the GPU, whose memory the step needs.
    return torch.cat(parts).cpu()


def changed_share(sample: torch.Tensor, later_sample: torch.Tensor, ranks: Ranks) -> float:
    """The share of the sampled weights that differs, over the data ranks, which all have to call this."""
    changed = (sample != later_sample).sum().item()
    counts = torch.tensor([changed, len(sample)], dtype=torch.float64, device=ranks.device)
    total_changed, total = ranks.sum(counts).tolist()
    return float(total_changed / total)
