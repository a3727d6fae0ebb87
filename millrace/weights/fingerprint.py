"""Identifies the bytes of a policy version: a hash or a sum per tensor, and one hash over them all.

Two processes with the same fingerprint hold the same names, dtypes, shapes and values, bit for bit. Hashes need whole
tensors. The sums of a tensor's parts add up to that of the whole, wherever the parts are, so `direct` uses them:

    words [rows, columns] of a box ─┬─► sum of each row · weight of the row     ┐
                                    └─► sum of each column · weight of the column ┴─► + : one number, modulo 2⁶⁴

Rows and columns count from the whole tensor's first, so a box that arrives at another place has another sum. Weights of
rows are odd and those of columns even: any change of a single word changes the sum. Only integer additions and
multiplications: a GPU computes the same number as a CPU, without moving the tensor.
"""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash

from millrace.errors import WeightsCorrupt
from storage.failpoints import failpoint

Region = tuple[tuple[int, int], ...]
"""A half-open range of indices per dimension of the whole tensor; () is all of a tensor without dimensions."""

_WORD = 8
"""Bytes of the words that are summed, where rows can be cut into them."""
_ALIGNED = 128
"""Bytes. Rows of a multiple of this length can be divided into as many as 16 equal parts of whole words. A part that
cuts through a word is filled up with zeros, which takes a copy of it."""
_BLOCK_BYTES = 1 << 20
"""On a CPU rows are summed in blocks of this size: the second sum then finds them in the cache."""
_ROW, _COLUMN = (0x9E3779B97F4A7C15, 0x632BE59BD9B4E019), (0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7)
"""Factor and offset of the weights, odd numbers of 64 bits."""
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# One thread reads about as fast as one core can from memory; more than two bring nothing.
_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Finds accidents at the speed of memory; it does not protect against malice."""

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


def region_sums(
    parts: Mapping[str, torch.Tensor], boxes: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """The sum of each box: `parts` has its elements, `shapes` the shapes of the whole tensors, by name.

    The values are in [0, 2⁶⁴). One device holds all parts, and is waited for once.
    """
    if not parts:
        return {}
    sums = torch.stack([_sum(part, boxes[name], shapes[name]) for name, part in parts.items()])
    return {name: value & _MASK for name, value in zip(parts, sums.tolist(), strict=True)}


def add_sums(sums: Iterable[int]) -> int:
    """The sum of a tensor out of those of its parts."""
    return sum(sums) & _MASK


def whole_region(shape: Iterable[int]) -> Region:
    """All of a tensor."""
    return tuple((0, extent) for extent in shape)


def _sum(part: torch.Tensor, box: Region, shape: tuple[int, ...]) -> torch.Tensor:
    """0-d int64."""
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    # A vector has a row per element: divisions of its only dimension are divisions of rows.
    rows, columns = (part.shape, 1) if part.ndim < 2 else (part.shape[:-1], part.shape[-1])
    first_column = box[-1][0] if part.ndim > 1 else 0
    whole_columns = shape[-1] if part.ndim > 1 else 1
    words = part.detach().contiguous().view(math.prod(rows), columns).view(torch.uint8)
    row_bytes = whole_columns * part.element_size()
    word = _WORD if row_bytes % _ALIGNED == 0 else part.element_size()
    first_word, bytes_before = divmod(first_column * part.element_size(), word)
    bytes_after = -(bytes_before + columns * part.element_size()) % word
    if bytes_before or bytes_after:
        # The zeros add nothing; the ranks that hold the other bytes of these words add them.
        words = torch.nn.functional.pad(words, (bytes_before, bytes_after))
    words = words.view(_INTEGERS[word])
    row_weights = _weights(_row_numbers(box[: len(rows)], shape, part.device), _ROW) | 1
    column_weights = _weights(torch.arange(words.shape[1], device=part.device) + first_word, _COLUMN) & -2
    by_row, by_column = _both_sums(words)
    return (by_row * row_weights).sum() + (by_column * column_weights).sum()


def _both_sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 sums of each row and of each column."""
    if words.shape[1] == 1:
        return words[:, 0].to(torch.int64), words.sum(dim=0, dtype=torch.int64)
    rows = len(words)
    if words.device.type == "cpu":
        rows = max(1, _BLOCK_BYTES // (words.shape[1] * words.element_size()))
    by_row = []
    by_column = torch.zeros(words.shape[1], dtype=torch.int64, device=words.device)
    for block in torch.split(words, rows):
        by_row.append(block.sum(dim=1, dtype=torch.int64))
        by_column += block.sum(dim=0, dtype=torch.int64)
    return torch.cat(by_row), by_column


def _row_numbers(box: Region, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[rows] int64 numbers of the box's rows in the whole tensor."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for (begin, end), extent in zip(box, shape, strict=False):
        numbers = (numbers[:, None] * extent + torch.arange(begin, end, device=device)).reshape(-1)
    return numbers


def _weights(numbers: torch.Tensor, constants: tuple[int, int]) -> torch.Tensor:
    factor, offset = (_signed(constant) for constant in constants)
    return numbers * factor + offset


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
