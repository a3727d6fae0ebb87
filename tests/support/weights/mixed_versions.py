"""Versions whose tensors are of several types and odd sizes, so that none begins where it likes to.

Every version of every incarnation has other bits in every tensor, and is the same in any process.
"""

import hashlib
from collections.abc import Mapping

import torch

from millrace.weights.base import Manifest, Probe, Weights, WeightsId

Tensors = dict[str, torch.Tensor]


def tensors_of(version: int, incarnation: int = 0) -> Tensors:
    """Of one version: bfloat16 and others, a single number, a few kilobytes."""
    random = torch.Generator().manual_seed(version + 1_000_000 * incarnation)
    return {
        "scale": torch.randn((), generator=random),
        "norm": torch.randn(3, generator=random).bfloat16(),
        "embed": torch.randn(70, 50, generator=random),
        "head": torch.randn(50, 3, 21, generator=random).half(),
        'a "quoted" bías': torch.randn(41, generator=random).double(),
    }


def manifest_of(version: int, incarnation: int = 0) -> Manifest:
    """What the trainer says of it: no fingerprint yet."""
    return Manifest(
        id=WeightsId(incarnation=incarnation, policy_version=version, t_offered=version + 0.5),
        probe=Probe(tokens=(1, 2), logprobs={version: -0.25}),
    )


def weights(version: int, incarnation: int = 0, tensors: Tensors | None = None) -> Weights:
    """A version as the trainer offers it; `tensors` are `tensors_of` it unless others are given."""
    return Weights(
        manifest=manifest_of(version, incarnation),
        tensors=tensors_of(version, incarnation) if tensors is None else tensors,
    )


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash that shares nothing with the one that is tested. 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
