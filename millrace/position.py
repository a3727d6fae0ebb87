"""Where a generator goes on: behind the last of its groups whose weights still exist.

    own stream, incarnation 0   … ║ v19 ║ v20 ║ v21 ║ v22 ║ …           the trainer was rolled back to v20 and is now 1
                                          └────────┐
    own stream, incarnation 1                      ║ v20 ║ v21' ║ …     the groups of v21 and v22 are made once more

So no prompt is skipped: what the trainer refuses, because its policy belongs to a future that was lost, is asked again
under the same group numbers. And none is repeated: of two groups with one number, the trainer refuses the first.
"""

from millrace.errors import LedgerMismatch
from millrace.lineage import Lineage
from millrace.scored import LostPart, ScoredGroup
from storage import layout
from storage.log import backwards
from storage.record import Record
from storage.schema import TRAJECTORY
from storage.store import Store
from storage.stream import read_part, stream_head


def next_group(store: Store, generator: int, num_generators: int, lineage: Lineage) -> int:
    """Number of the group that a generator makes next under weights of this lineage, by what its stream holds."""
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
    """What records did not say before schema version 2."""
    last = read_part(store, path, TRAJECTORY, record, columns=["incarnation", "group_id"]).slice(record.rows - 1)
    return last["incarnation"][0].as_py(), last["group_id"][0].as_py()


class Positions:
    """Which group is due from each generator: the trainer's check that no prompt was skipped or repeated.

    `due` is what an earlier `due` held, or None at the beginning.
    """

    def __init__(self, num_generators: int, due: list[int] | None) -> None:
        self._num_generators = num_generators
        self.due = list(range(num_generators)) if due is None else list(due)
        """[generators] group numbers."""

    def pass_group(self, group: ScoredGroup) -> None:
        """Counts a group whose weights exist. Raises LedgerMismatch, which names its rows, unless it was due."""
        due = self.due[group.generator]
        if group.group_id != due:
            first, last = group.first_row_id, group.first_row_id + len(group.rewards) - 1
            raise LedgerMismatch(
                f"{layout.trajectories(group.generator)}, rows {first} to {last}: group {group.group_id}, where group "
                f"{due} was due: a prompt was {'skipped' if group.group_id > due else 'repeated'}"
            )
        self.due[group.generator] += self._num_generators

    def pass_lost(self, part: LostPart, num_groups: int) -> None:
        """Counts the groups of a part that can't be read, whose weights exist."""
        self.due[part.generator] += num_groups * self._num_generators
