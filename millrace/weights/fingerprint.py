"""Which bytes a policy version is: a hash a tensor, and one over them all.

Two processes that agree on a fingerprint hold the same names, dtypes, shapes and values, bit for bit.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from storage.failpoints import failpoint

# A thread reads at about the speed of one core's way to memory; more than two find no more to read.
_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """XXH3 (128 bits, hex) of tensors: it finds accidents, at the speed of memory; it is no defence against malice."""

    tensors: Mapping[str, str]
    """Parameter name → hash of its dtype, shape and bytes."""

    @property
    def digest(self) -> str:
        """One hash for the whole version, whatever order its tensors come in. 32 hex digits."""
        lines = "\n".join(f"{name} {value}" for name, value in sorted(self.tensors.items()))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def differs(self, other: "Fingerprint") -> list[str]:
        """Names that one has and the other has not, or not with this hash; sorted."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Of tensors by name, in any memory; contiguous ones on the CPU are read in place."""
    # The big ones first, so that no thread is left alone with one at the end.
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, found in zip(names, threads.map(lambda name: hash_tensor(tensors[name]), names), strict=True):
            hashes[name] = found
            failpoint("weights.mid_hash")
    return Fingerprint(tensors={name: hashes[name] for name in tensors})


def hash_tensor(tensor: torch.Tensor) -> str:
    """Of one tensor's dtype, shape and bytes: XXH3 (128 bits), hex."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    state = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    # numpy knows no bfloat16: its bytes are looked at instead.
    state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()


def names_of(names: Iterable[str], most: int = 5) -> str:
    """The first of some names, for a sentence."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
