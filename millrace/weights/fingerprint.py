"""Identifies the bytes of a policy version: a hash per tensor, and one over them all.

Two processes with the same fingerprint hold the same names, dtypes, shapes and values, bit for bit.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from millrace.errors import WeightsCorrupt
from storage.failpoints import failpoint

# One thread reads about as fast as one core can from memory; more than two bring nothing.
_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """XXH3 (128 bits, hex) of tensors: finds accidents at the speed of memory, and is no defence against malice."""

    tensors: Mapping[str, str]
    """Parameter name → hash of its dtype, shape and bytes."""

    @property
    def digest(self) -> str:
        """One hash for the whole version, in whatever order its tensors come. 32 hex digits."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def verify(self, found: "Fingerprint", what: str) -> None:
        """Raises WeightsCorrupt, with `what` is damaged and the tensors, unless both are the same."""
        names = self.tensors.keys() | found.tensors.keys()
        if differing := sorted(name for name in names if self.tensors.get(name) != found.tensors.get(name)):
            raise WeightsCorrupt(f"{what} are damaged: {names_of(differing)}")


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """The fingerprint of tensors in any memory; contiguous ones on the CPU are read in place."""
    # The big ones first, so that no thread is left alone with one at the end.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, found in zip(names, threads.map(lambda name: hash_tensor(tensors[name]), names), strict=True):
            hashes[name] = found
            failpoint("weights.mid_hash")
    return Fingerprint(tensors={name: hashes[name] for name in tensors})


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
