"""Identifies the bytes of a policy version: a hash per tensor, and one hash over them all.

Two processes with the same fingerprint hold the same names, dtypes, shapes and values, bit for bit. A tensor that no
process holds whole, as in `direct`, is hashed by parts:

    box of rank 0 ─► hash ─┐
    box of rank 1 ─► hash ─┴─► hash of the hashes; who holds the tensor whole gets the same by hashing the same boxes
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import xxhash

from millrace.errors import WeightsCorrupt
from storage.failpoints import failpoint

Region = tuple[tuple[int, int], ...]
"""A half-open range of indices per dimension of the whole tensor; () is all of a tensor without dimensions."""

# One thread reads about as fast as one core can from memory; more than two bring nothing.
_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Finds accidents at the speed of memory; it does not protect against malice."""

    tensors: Mapping[str, str]
    """Parameter name → hex: XXH3 (128 bits) of dtype, shape and bytes, or of the hashes of its parts."""
    boxes: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """The parts of each tensor that is hashed by parts, in their order."""

    @property
    def digest(self) -> str:
        """One hash for the whole version, in whatever order its tensors come. 32 hex digits."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def verify(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless this is the fingerprint of `tensors`."""
        self.match(fingerprint(tensors, self.boxes), what)

    def match(self, other: "Fingerprint", what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless both are the same."""
        names = self.tensors.keys() | other.tensors.keys()
        if differing := sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name)):
            raise WeightsCorrupt(f"{what} are damaged: {names_of(differing)}")


def fingerprint(
    tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, tuple[Region, ...]] | None = None
) -> Fingerprint:
    """The fingerprint of tensors in any memory; contiguous ones on the CPU are read in place. `boxes`: by parts."""
    boxes = boxes or {}

    def hash_named(name: str) -> str:
        parts = [tensors[name][tuple(slice(begin, end) for begin, end in box)] for box in boxes.get(name, ())]
        return combine_hashes(map(hash_tensor, parts)) if parts else hash_tensor(tensors[name])

    # The big ones first, so that no thread is left alone with one at the end.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, value in zip(names, threads.map(hash_named, names), strict=True):
            hashes[name] = value
            failpoint("weights.mid_hash")
    return Fingerprint(tensors={name: hashes[name] for name in tensors}, boxes=boxes)


def combine_hashes(hashes: Iterable[str]) -> str:
    """The hash of a tensor out of those of its parts: of a single part, which is the whole tensor, its own."""
    parts = list(hashes)
    return parts[0] if len(parts) == 1 else xxhash.xxh3_128_hexdigest(" ".join(parts).encode())


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
