"""Identifies the bytes of a policy version: a hash or a sum per tensor, and one hash over them all.

Two processes with the same fingerprint hold the same names, dtypes, shapes and values, bit for bit. Hashes need whole
tensors. Sums add up from the trainer ranks' parts, so `direct` uses them (`sums.py`).
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash

from millrace.errors import WeightsCorrupt
from millrace.weights.sums import region_sums, whole_region
from storage.failpoints import failpoint

# One thread reads about as fast as one core can from memory; more than two bring nothing.
_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Finds accidents at the speed of memory, and is no defence against malice."""

    tensors: Mapping[str, str]
    """Parameter name → hex: XXH3 (128 bits) of dtype, shape and bytes, or the sum (64 bits)."""
    kind: Literal["hash", "sum"] = "hash"

    @property
    def digest(self) -> str:
        """One hash for the whole version, in whatever order its tensors come. 32 hex digits."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def verify(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless this is the fingerprint of `tensors`."""
        self.match(fingerprint(tensors) if self.kind == "hash" else fingerprint_of_sums(tensors), what)

    def match(self, other: "Fingerprint", what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless both are the same."""
        names = self.tensors.keys() | other.tensors.keys()
        if differing := sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name)):
            raise WeightsCorrupt(f"{what} are damaged: {names_of(differing)}")


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """The fingerprint of tensors in any memory; contiguous ones on the CPU are read in place."""
    # The big ones first, so that no thread is left alone with one at the end.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, value in zip(names, threads.map(lambda name: hash_tensor(tensors[name]), names), strict=True):
            hashes[name] = value
            failpoint("weights.mid_hash")
    return Fingerprint(tensors={name: hashes[name] for name in tensors})


def fingerprint_of_sums(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """The fingerprint of whole tensors by their sums, which are those of their parts added up."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sums = region_sums(tensors, {name: whole_region(shape) for name, shape in shapes.items()}, shapes)
    return sums_as_fingerprint(sums)


def sums_as_fingerprint(sums: Mapping[str, int]) -> Fingerprint:
    """The fingerprint that consists of these sums of whole tensors."""
    return Fingerprint(tensors={name: f"{value:016x}" for name, value in sums.items()}, kind="sum")


def hash_tensor(tensor: torch.Tensor) -> str:
    """XXH3 (128 bits, hex) of one tensor's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    state = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    # As bytes: numpy knows no bfloat16.
    state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()


def names_of(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list, for a message."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
