"""Names of a checkpoint's files, and the checksum of its weights; needs no torch.

one rank         model.safetensors             optimizer.safetensors             rng.safetensors
rank 1 of 4      model-1-of-4.safetensors      optimizer-1-of-4.safetensors      (only rank 0 writes it)
its second file                                optimizer-1-of-4.1.safetensors    (if one is too large)
"""

import zlib

from storage.checkpoints import Checkpoint

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
"""Kinds of tensors: the policy's parameters, AdamW's state, the state of torch's random numbers."""
WEIGHTS_FILE = f"{MODEL}.safetensors"
"""The first file of the policy's parameters, written by a single rank."""


def file_name(kind: str, rank: int, size: int, part: int = 0) -> str:
    """Name of file `part` of rank `rank` among `size` ranks; a single rank, and the first file, get no number."""
    ranks = "" if size == 1 else f"-{rank}-of-{size}"
    return f"{kind}{ranks}{f'.{part}' if part else ''}.safetensors"


def kind_of(name: str) -> str:
    """The kind of tensors in the file of this name."""
    return name.partition(".")[0].partition("-")[0]


def weights_checksum(checkpoint: Checkpoint) -> str:
    """8 hex digits that identify weights: the CRC-32C of a single file, or the CRC-32 of those of several files."""
    checksums = [ref.checksum for name, ref in sorted(checkpoint.files.items()) if kind_of(name) == MODEL]
    return checksums[0] if len(checksums) == 1 else f"{zlib.crc32(''.join(checksums).encode()):08x}"
