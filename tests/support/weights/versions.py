"""Versions that are the same in any process: of mixed types and odd sizes, or as training makes them."""

import hashlib
from collections.abc import Mapping

import torch

from millrace.weights.adapter import Adapter
from millrace.weights.base import Manifest, Probe, Weights, WeightsId
from millrace.weights.fingerprint import fingerprint

Tensors = dict[str, torch.Tensor]
_ADAPTER = Adapter(rank=3, alpha=16.0, target_modules=("q_proj", "o_proj"))


def manifest_of(version: int, incarnation: int = 0) -> Manifest:
    """The trainer's manifest of a version, without a fingerprint; odd versions are LoRA adapters."""
    return Manifest(
        id=WeightsId(incarnation=incarnation, policy_version=version, t_offered=version + 0.5),
        probe=Probe(tokens=(1, 2), logprobs={version: -0.25}),
        adapter=_ADAPTER if version % 2 else None,
    )


def mixed_tensors(version: int, incarnation: int = 0) -> Tensors:
    """Several types and odd sizes, a few kilobytes; each version of each incarnation has other bits in every tensor."""
    random = torch.Generator().manual_seed(version + 1_000_000 * incarnation)
    return {
        "scale": torch.randn((), generator=random),
        "norm": torch.randn(3, generator=random).bfloat16(),
        "embed": torch.randn(70, 50, generator=random),
        "head": torch.randn(50, 3, 21, generator=random).half(),
        'a "quoted" bías': torch.randn(41, generator=random).double(),
    }


def mixed(version: int, incarnation: int = 0, tensors: Tensors | None = None) -> Weights:
    """A version as the trainer publishes it; of `mixed_tensors` unless others are given."""
    tensors = mixed_tensors(version, incarnation) if tensors is None else tensors
    return Weights(manifest=manifest_of(version, incarnation), tensors=tensors)


def trained_tensors(version: int) -> Tensors:
    """A small bfloat16 model: from one version to the next every fiftieth element of `embed` changes."""
    random = torch.Generator().manual_seed(7)
    embed = torch.randn(100, 80, generator=random).bfloat16()
    head = torch.randn(80, 100, generator=random).bfloat16()
    bits = embed.view(torch.int16).view(-1)
    for step in range(1, version + 1):
        bits[step % 50 :: 50] += (1, -1, 2)[step % 3]
    return {"embed": embed, "head": head, "norm": torch.full((80,), 1.0 + version)}


def trained(version: int, incarnation: int = 0, tensors: Tensors | None = None) -> Weights:
    """A version as sync_weights publishes it; of `trained_tensors` unless others are given."""
    tensors = trained_tensors(version) if tensors is None else tensors
    weights_id, probe = manifest_of(version, incarnation).id, manifest_of(version).probe
    return Weights(manifest=Manifest(id=weights_id, probe=probe, fingerprint=fingerprint(tensors)), tensors=tensors)


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash that shares nothing with the one that is tested. 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
