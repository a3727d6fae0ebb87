"""Versions of a small bfloat16 model as training at a small learning rate makes them: few elements change a step."""

import torch

from millrace.weights.base import Manifest, Probe, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint

Tensors = dict[str, torch.Tensor]


def tensors_of(version: int) -> Tensors:
    """Of one version, the same in any process. From one to the next every fiftieth element of `embed` changes."""
    random = torch.Generator().manual_seed(7)
    embed = torch.randn(100, 80, generator=random).bfloat16()
    head = torch.randn(80, 100, generator=random).bfloat16()
    bits = embed.view(torch.int16).view(-1)
    for step in range(1, version + 1):
        bits[step % 50 :: 50] += (1, -1, 2)[step % 3]
    return {"embed": embed, "head": head, "norm": torch.full((80,), 1.0 + version)}


def weights(version: int, incarnation: int = 0, tensors: Tensors | None = None) -> Weights:
    """A version as sync_weights hands it to a transport; `tensors` are `tensors_of` it unless others are given."""
    tensors = tensors_of(version) if tensors is None else tensors
    manifest = Manifest(
        id=WeightsId(incarnation=incarnation, policy_version=version, t_offered=version + 0.5),
        probe=Probe(tokens=(1, 2), logprobs={version: -0.25}),
        fingerprint=fingerprint(tensors),
    )
    return Weights(manifest=manifest, tensors=tensors)
