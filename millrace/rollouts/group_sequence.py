"""Which group comes next from each generator: for the generator that resumes, and for the trainer that checks.

    own stream, incarnation 0   … ║ v19 ║ v20 ║ v21 ║ v22 ║ …           the trainer was rolled back to v20 and is now 1
                                          └────────┐
    own stream, incarnation 1                      ║ v20 ║ v21' ║ …     the groups of v21 and v22 are made once more

A generator resumes after the last of its groups whose weights still exist. No prompt is skipped: groups that the
trainer refuses, because their policy was rolled back, are generated again under the same numbers. And none is repeated:
of two groups with one number, the trainer refuses the first.
"""

from millrace.errors import LedgerMismatch
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import backwards
from storage.streams.record import Record
from storage.streams.stream import read_part, stream_head


def next_group(store: Store, generator: int, num_generators: int, lineage: Lineage) -> int:
    """The number of the generator's next group under weights of this lineage, from its own stream."""
    path = layout.trajectories(generator)
    for record in backwards(store, path, stream_head(store, path)):
        if record.kind != "data":
            continue
        incarnation, last_group_id = record.incarnation, record.last_group_id
        if record.schema_version < 2:
            incarnation, last_group_id = _read(store, path, record)
        if lineage.holds(incarnation, record.max_policy_version):
            return last_group_id + num_generators
    return generator


def _read(store: Store, path: str, record: Record) -> tuple[int, int]:
    """(incarnation, last group) of a part from before schema version 2, whose record does not hold them."""
    last = read_part(store, path, TRAJECTORY, record, columns=["incarnation", "group_id"]).slice(record.rows - 1)
    return last["incarnation"][0].as_py(), last["group_id"][0].as_py()


class GroupSequence:
    """The trainer's check that no prompt was skipped or repeated: groups of each generator come in sequence.

    `next_expected` is what an earlier `next_expected` held, or None at the beginning.
    """

    def __init__(self, num_generators: int, next_expected: list[int] | None) -> None:
        self._num_generators = num_generators
        self.next_expected = list(range(num_generators)) if next_expected is None else list(next_expected)
        """[generators] number of the next group."""

    def pass_group(self, group: ScoredGroup) -> None:
        """Counts a group whose weights exist. Raises LedgerMismatch, naming its rows, unless it is the next one."""
        expected = self.next_expected[group.generator]
        if group.group_id != expected:
            first, last = group.first_row_id, group.first_row_id + len(group.rewards) - 1
            raise LedgerMismatch(
                f"{layout.trajectories(group.generator)}, rows {first} to {last}: found group {group.group_id}, "
                f"expected group {expected}: a prompt was {'skipped' if group.group_id > expected else 'repeated'}"
            )
        self.next_expected[group.generator] += self._num_generators

    def pass_lost(self, part: LostPart, num_groups: int) -> None:
        """Counts the groups of an unreadable part whose weights exist."""
        self.next_expected[part.generator] += num_groups * self._num_generators
