"""The files of a checkpoint as ranks would write them, without any ranks."""

from collections.abc import Mapping, Sequence

from millrace.training.checkpoints.files import Block, FileImage
from millrace.training.checkpoints.names import file_name


def rank_files(kind: str, held: Sequence[Mapping[str, Block]]) -> dict[str, bytes]:
    """By name: what so many ranks write that hold these blocks."""
    files = {}
    for rank, blocks in enumerate(held):
        image = FileImage(kind, blocks, len(held))
        image.take(blocks)
        files[file_name(kind, rank, len(held))] = bytes(image.data)
    return files
