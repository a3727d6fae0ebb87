"""Identifies the bytes of a policy version: a hash per tensor, and one hash over them all.

Two processes with the same fingerprint hold the same names, dtypes, shapes and values, bit for bit. A tensor that no
process holds whole, as in `direct`, is hashed by parts:

    box of rank 0 ─► hash ─┐
    box of rank 1 ─► hash ─┴─► hash of the hashes; who holds the tensor whole gets the same by hashing the same boxes
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import xxhash

from millrace.errors import WeightsCorrupt
from storage.failpoints import failpoint

Region = tuple[tuple[int, int], ...]
"""A half-open range of indices per dimension of the whole tensor; () is all of a tensor without dimensions."""

Method = Literal["xxh3", "sums"]
"""How bytes are hashed. `xxh3`: in the CPU's memory; `sums`: on the tensor's device, by sums of its bits."""

HASH_THREADS = 2
"""One thread reads about as fast as one core can from memory; more than two bring nothing."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Finds accidents at the speed of memory; it does not protect against malice."""

    tensors: Mapping[str, str]
    """Parameter name → hex: XXH3 (128 bits) of dtype, shape and bytes, or of the hashes of its parts."""
    boxes: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """The parts of each tensor that is hashed by parts, in their order."""
    method: Method = "xxh3"

    @property
    def digest(self) -> str:
        """One hash for the whole version, in whatever order its tensors come. 32 hex digits."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def verify(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless this is the fingerprint of `tensors`."""
        self.match(fingerprint(tensors, self.boxes, self.method), what)

    def match(self, other: "Fingerprint", what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the names, unless both are the same."""
        names = self.tensors.keys() | other.tensors.keys()
        if differing := sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name)):
            raise WeightsCorrupt(f"{what} are damaged: {names_of(differing)}")


def fingerprint(
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, tuple[Region, ...]] | None = None,
    method: Method = "xxh3",
) -> Fingerprint:
    """The fingerprint of tensors in any memory; contiguous ones on the CPU are read in place. `boxes`: by parts."""
    boxes = boxes or {}

    def hash_named(name: str) -> str:
        return hash_parts(tensors[name], boxes.get(name, ()), method)

    # The big ones first, so that no thread is left alone with one at the end.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for name, value in zip(names, threads.map(hash_named, names), strict=True):
            hashes[name] = value
            failpoint("weights.mid_hash")
    return Fingerprint(tensors={name: hashes[name] for name in tensors}, boxes=boxes, method=method)


def hash_parts(tensor: torch.Tensor, boxes: Iterable[Region], method: Method) -> str:
    """The hash of a tensor by these parts of it; of the whole tensor if there are none."""
    parts = [part_of(tensor, box) for box in boxes]
    return combine_hashes(map(partial(hash_tensor, method=method), parts or [tensor]))


def part_of(tensor: torch.Tensor, box: Region) -> torch.Tensor:
    """A view of the elements in `box`."""
    return tensor[tuple(slice(begin, end) for begin, end in box)]


def combine_hashes(hashes: Iterable[str]) -> str:
    """The hash of a tensor out of those of its parts: of a single part, which is the whole tensor, its own."""
    parts = list(hashes)
    return parts[0] if len(parts) == 1 else xxhash.xxh3_128_hexdigest(" ".join(parts).encode())


def hash_tensor(tensor: torch.Tensor, method: Method = "xxh3") -> str:
    """XXH3 (128 bits, hex) of one tensor's dtype, shape and bytes, or of sums of them."""
    state = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    if method == "sums":
        state.update(repr(_sums(tensor)).encode())
        return state.hexdigest()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # As bytes: numpy knows no bfloat16.
    state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()


def _sums(tensor: torch.Tensor) -> list[int]:
    """Σ x and Σ i · x modulo 2^64 over the elements' bits x as integers, computed on the tensor's device."""
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    # By pieces, whose integers of 8 bytes take little memory.
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + piece.numel(), device=tensor.device)
        sums += torch.stack([piece.sum(), (piece * positions).sum()])
    values: list[int] = sums.tolist()
    return values


def names_of(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list, for a message."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
