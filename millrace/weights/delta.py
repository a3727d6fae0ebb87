"""Compact deltas between two versions of the same tensors; applying one gives the exact bits of the newer version.

    old, new ──► elements whose bits differ ─┬─► gaps between them ──► bytes; 255 means "255, and more" ────┐
                                             └─► new − old, wrapped, zigzag ──► byte planes ────────────────┤
                 names, dtypes, shapes, both digests ──► JSON ──────────────────────────────────────────────┴─► zstd

    file   magic, format, lengths │ JSON │ gaps │ differences        the last three each one zstd frame

AdamW at a small learning rate moves few elements of a bfloat16 model per step, most of them to the next number up or
down. The gaps between those are random, so one byte each, entropy coded, is near the least possible (where 2.8 % of
4 M elements changed: 6.65 bits per gap, of 6.58). Differences of bit patterns are exact for every dtype, NaN and −0
included; differences of numbers are not.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.shared_tensors import shapes_from_json, shapes_of
from storage.stores.base import BytesLike

_MAGIC = b"MRWDELTA"
_FORMAT = 1
_PRELUDE = struct.Struct("<8sIQQQ")  # magic, format, bytes: JSON compressed, JSON, gaps compressed
_MORE = 255
_SAMPLED = 101  # one element in this many; a prime, so that it does not stay in one column of a matrix
# Higher levels look for repetitions; there are none.
_ZSTD = pa.Codec("zstd", compression_level=1)

_Unsigned = npt.NDArray[Any]
"""Unsigned integers as wide as the elements they stand for."""


def share_changed(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> float:
    """The share of elements whose bits differ, 0 to 1, estimated from a sample; tensors as for `encode`."""
    sampled = changed = 0
    for name, tensor in new.items():
        old_bits, new_bits = (_bits(each.contiguous())[::_SAMPLED] for each in (old[name], tensor))
        sampled += new_bits.size
        changed += int(np.count_nonzero(old_bits != new_bits))
    return changed / max(1, sampled)


def encode(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], *, base: str, digest: str) -> bytes:
    """The delta from `old`, whose digest is `base`, to `new`, whose digest is `digest`; both on the CPU.

    Raises ValueError if their names, dtypes or shapes differ.
    """
    shapes = shapes_of(new)
    if sorted(shapes_of(old)) != sorted(shapes):
        raise ValueError("a delta is between tensors of the same names, dtypes and shapes")
    positions: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    differences: list[_Unsigned] = [np.empty(0, np.uint8)]
    first = 0
    for name, tensor in new.items():
        old_bits, new_bits = _bits(old[name].contiguous()), _bits(tensor.contiguous())
        changed = np.flatnonzero(old_bits != new_bits)
        positions.append(changed + first)
        differences.append(_zigzag(new_bits[changed] - old_bits[changed]))
        first += new_bits.size
    gaps = _encode_gaps(np.concatenate(positions))
    # As wide as the widest dtype: the bytes that narrower ones don't need are planes of zeros, and cost nothing.
    joined = np.concatenate(differences)
    sizes = {"changed": joined.size, "width": joined.itemsize, "gaps": gaps.size}
    header = json.dumps({"base": base, "digest": digest, "shapes": shapes} | sizes).encode()
    parts = [_compress(header), _compress(gaps), _compress(_to_planes(joined))]
    prelude = _PRELUDE.pack(_MAGIC, _FORMAT, len(parts[0]), len(header), len(parts[1]))
    return b"".join([prelude, *parts])


def apply(tensors: Mapping[str, torch.Tensor], data: BytesLike, *, holds: str) -> str:
    """Applies a delta in place to `tensors`, whose digest is `holds`; returns the new digest.

    `tensors` are contiguous, on the CPU. `data` comes from `encode`, and its bytes are verified already. Raises
    WeightsCorrupt, without changing `tensors`, unless it is a delta from `holds` between tensors like these.
    """
    header, gaps, planes = _open(memoryview(data))
    shapes = shapes_from_json(header["shapes"])
    if header["base"] != holds:
        raise WeightsCorrupt(f"the delta leads from {header['base']} to {header['digest']}, but here is {holds}")
    if sorted(shapes) != sorted(shapes_of(tensors)):
        raise WeightsCorrupt("the delta is between tensors of other names, dtypes or shapes")
    positions = _decode_gaps(gaps)
    differences = _from_planes(planes, header["width"])
    targets = [_bits(tensors[name]) for name, _, _ in shapes]
    ends = np.cumsum([target.size for target in targets])
    for target, end, until in zip(targets, ends, np.searchsorted(positions, ends), strict=True):
        since = np.searchsorted(positions, end - target.size)
        changed = positions[since:until] - (end - target.size)
        target[changed] += _unzigzag(differences[since:until].astype(target.dtype))
    digest: str = header["digest"]
    return digest


def _open(data: memoryview) -> tuple[dict[str, Any], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Header, gaps and planes of a delta."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise WeightsCorrupt("not a delta of weights")
    _, version, packed_header_bytes, header_bytes, packed_gap_bytes = _PRELUDE.unpack_from(data)
    if version != _FORMAT:
        raise WeightsCorrupt(f"a delta of format {version}; this Millrace reads format {_FORMAT} only")
    gaps_at = _PRELUDE.size + packed_header_bytes
    planes_at = gaps_at + packed_gap_bytes
    header = json.loads(_decompress(data[_PRELUDE.size : gaps_at], header_bytes).tobytes())
    gaps = _decompress(data[gaps_at:planes_at], header["gaps"])
    return header, gaps, _decompress(data[planes_at:], header["changed"] * header["width"])


def _bits(tensor: torch.Tensor) -> _Unsigned:
    """The elements of a contiguous tensor as unsigned integers; a view."""
    flat: npt.NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.dtype.itemsize}")


def _zigzag(differences: _Unsigned) -> _Unsigned:
    """0, −1, 1, −2, … as 0, 1, 2, 3, …: small ones have zeros in all bytes but the lowest."""
    bits = 8 * differences.itemsize
    signed: npt.NDArray[Any] = differences.view(f"i{differences.itemsize}")
    folded: _Unsigned = ((signed << 1) ^ (signed >> (bits - 1))).view(differences.dtype)
    return folded


def _unzigzag(values: _Unsigned) -> _Unsigned:
    odd: _Unsigned = values & 1
    unfolded: _Unsigned = (values >> 1) ^ np.negative(odd)
    return unfolded


def _encode_gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    fulls, rests = np.divmod(np.diff(positions, prepend=-1) - 1, _MORE)
    encoded = np.full(positions.size + fulls.sum(), _MORE, np.uint8)
    encoded[np.cumsum(fulls + 1) - 1] = rests
    return encoded


def _decode_gaps(encoded: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    passed: npt.NDArray[np.int64] = np.cumsum(encoded, dtype=np.int64)[encoded != _MORE]
    passed += np.arange(passed.size)
    return passed


def _to_planes(values: _Unsigned) -> npt.NDArray[np.uint8]:
    """All lowest bytes, then all second ones, …"""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _from_planes(planes: npt.NDArray[np.uint8], width: int) -> _Unsigned:
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"u{width}")


def _compress(data: bytes | npt.NDArray[np.uint8]) -> bytes:
    packed: bytes = _ZSTD.compress(data, asbytes=True)
    return packed


def _decompress(packed: memoryview, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(_ZSTD.decompress(packed, nbytes), np.uint8)
