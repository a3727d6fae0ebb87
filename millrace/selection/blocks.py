"""A block of groups in the store: which prompt each has. Decided once, and never written again.

curriculum/<block>.json    {"crc": …, "prompts": [7, 0, …], "turns": [0.0, 0.0, …], "num_prompts": 100, …}      sealed
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal


@dataclass(frozen=True, kw_only=True)
class Block:
    """The prompts of consecutive groups."""

    prompts: list[int]
    """[groups] index of each group's prompt among the training prompts."""
    turns: list[float]
    """[groups] the turn at which it was asked, never falling; see `millrace.selection.turns`."""
    num_prompts: int
    """Training prompts that it was drawn from."""
    num_easy: int
    """How many of them were asked less often because they were easy."""
    num_hard: int
    """How many because they were hard."""


def read_block(store: Store, number: int) -> Block | None:
    """The block of that number; None if it is not decided. Raises StreamCorrupt."""
    path = layout.curriculum_block(number)
    try:
        data = bytes(store.get(path))
    except NotInStore:
        return None
    return parse_block(data, path)


def write_block(store: Store, number: int, block: Block) -> bool:
    """Decides a block. Returns False if it was decided before; then it stays as it was."""
    return store.put_if_absent(layout.curriculum_block(number), seal(dataclasses.asdict(block)))


def parse_block(data: bytes, path: str) -> Block:
    """The block in the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        values = unseal(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"it is {error}; restore this file from a copy of the run") from error
    try:
        block = Block(**values)
        sound = (
            len(block.prompts) == len(block.turns) > 0
            and all(0 <= prompt < block.num_prompts for prompt in block.prompts)
            and all(earlier <= later for earlier, later in pairwise([0.0, *block.turns, math.inf]))
        )
    except TypeError:
        sound = False
    if not sound:
        raise StreamCorrupt(path, "expected a sealed object with a prompt and a turn for each group of a block")
    return block
