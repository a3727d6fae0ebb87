"""Blocks of groups as they are stored: which source and which prompt each group has.

prompt_blocks/<block>.json    {"crc": …, "policy_version": 8, "sources": {"sums": {"groups": [0, 2, …], …}, …}}   sealed

A block is written once and stays. So a group has the same prompt in every process, also after a restart or a rollback
(docs/decisions/04).
"""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal


@dataclass(frozen=True, kw_only=True)
class SourceBlock:
    """The groups of one source in a block."""

    groups: list[int]
    """Which groups of the block it has, counted from the first, ascending."""
    positions: list[int]
    """[groups] where each group's prompt is in the source's `PromptOrder`, ascending. Positions that are left out are
    of prompts that this epoch skips."""
    num_prompts: int
    """Training prompts that they were drawn from."""
    num_easy: int
    """How many of them were asked less often because they were easy."""
    num_hard: int
    """How many because they were hard."""
    weight: float
    """The source's weight in the mixture when the block was decided."""
    credit: float
    """Groups that it has had too few of so far, by its weights, dropped ones not counted; less than 0: too many."""
    num_dropped: int
    """Groups of it that the trainer had dropped by then."""


@dataclass(frozen=True, kw_only=True)
class PromptBlock:
    """The prompts of consecutive groups."""

    policy_version: int
    """Version of the weights for which it was decided."""
    sources: dict[str, SourceBlock]
    """By name, in the order of the config."""


def read_block(store: Store, number: int) -> PromptBlock | None:
    """The block of that number; None if it is not decided. Raises StreamCorrupt."""
    path = layout.prompt_block(number)
    try:
        return parse_block(bytes(store.get(path)), path)
    except NotInStore:
        return None


def write_block(store: Store, number: int, block: PromptBlock) -> bool:
    """Decides a block. Returns False if it was decided before; then it stays as it was."""
    return store.put_if_absent(layout.prompt_block(number), seal(dataclasses.asdict(block)))


def parse_block(data: bytes, path: str) -> PromptBlock:
    """The block in the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        values = unseal(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"it is {error}; {RESTORE}") from error
    block = parse_as(PromptBlock, values, path)
    groups = sorted(group for source in block.sources.values() for group in source.groups)
    if not groups or groups != list(range(len(groups))):
        raise StreamCorrupt(path, f"its groups are not each of one source; {RESTORE}")
    for source in block.sources.values():
        if len(source.groups) != len(source.positions) or any(
            later <= earlier for each in (source.groups, source.positions) for earlier, later in pairwise([-1, *each])
        ):
            raise StreamCorrupt(path, f"its positions do not ascend; {RESTORE}")
    return block
