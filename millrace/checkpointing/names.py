"""What the files of a trainer's checkpoint are called, and which of them say what the policy is; needs no torch.

one rank         model.safetensors             optimizer.safetensors             rng.safetensors
rank 1 of 4      model-1-of-4.safetensors      optimizer-1-of-4.safetensors      (rank 0's alone)
more than fits   …, its second file:           optimizer-1-of-4.1.safetensors
"""

import zlib

from storage.checkpoints import Checkpoint

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
"""Kinds of tensors: the policy's parameters, AdamW's state, the state of torch's random numbers."""
WEIGHTS_FILE = f"{MODEL}.safetensors"
"""Where a trainer that was alone keeps the policy's parameters, or the first of them."""


def file_name(kind: str, rank: int, size: int, part: int = 0) -> str:
    """The name of file `part` of rank `rank` among `size` ranks; one rank, and the first file, need no number."""
    ranks = "" if size == 1 else f"-{rank}-of-{size}"
    return f"{kind}{ranks}{f'.{part}' if part else ''}.safetensors"


def kind_of(name: str) -> str:
    """The kind of tensors in the file of this name."""
    return name.partition(".")[0].partition("-")[0]


def weights_checksum(checkpoint: Checkpoint) -> str:
    """8 hex digits that tell weights apart: of one file its CRC-32C, of several the CRC-32 of all of theirs."""
    checksums = [ref.checksum for name, ref in sorted(checkpoint.files.items()) if kind_of(name) == MODEL]
    return checksums[0] if len(checksums) == 1 else f"{zlib.crc32(''.join(checksums).encode()):08x}"
