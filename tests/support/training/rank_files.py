"""The files of a checkpoint as ranks would write them, without any ranks."""

from collections.abc import Mapping, Sequence

from millrace.training.checkpoints.files import Block, FileImage
from millrace.training.checkpoints.names import file_name


def rank_files(kind: str, held: Sequence[Mapping[str, Block]]) -> dict[str, bytes]:
    """The files, by name, that ranks write; each rank holds one of `held`."""
    files = {}
    for rank, blocks in enumerate(held):
        image = FileImage(kind, blocks, len(held))
        image.take(blocks)
        files[file_name(kind, rank, len(held))] = bytes(image.data)
    return files
