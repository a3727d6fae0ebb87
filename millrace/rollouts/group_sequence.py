"""The groups that each generator has committed. A generator resumes from them; the trainer checks them.

    its groups        0   2   4   6   8   10  12          generator 0 of 2; 4 and 8 are still in flight
    committed         ■   ■       ■       ■               last: 10, missing: 4, 8
    after a restart           4       8       12, 14, …   the missing groups first, then the next ones

Groups are admitted in order and finish in any order. Each commit record holds the highest group committed up to its
part, and the lower groups that are still missing. A generator resumes from the newest record whose weights exist, so no
prompt is skipped or sampled twice. The trainer keeps the same count from the parts it reads, and the two must agree.

    stream, incarnation 0   … ║ v19 ║ v20 ║ v21 ║ v22 ║ …           the trainer was rolled back to v20; it is now 1
                                      └────────┐
    stream, incarnation 1                      ║ v20 ║ v21' ║ …     the groups of v21 and v22 are generated again

Groups that the trainer refuses, because their policy was rolled back, are generated again under the same numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from millrace.errors import LedgerMismatch
from millrace.rollouts.lineage import Lineage
from storage import layout
from storage.stores.base import Store
from storage.streams.log import LogCursor, backwards
from storage.streams.record import Record
from storage.streams.stream import stream_head


@dataclass(kw_only=True)
class GroupSet:
    """The committed groups of one generator: all its numbers up to `last`, except the `missing` ones."""

    num_generators: int
    """Distance between two of the generator's group numbers."""
    last: int
    """The highest group; the generator's first number minus `num_generators` before any group is committed."""
    missing: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, generator: int, num_generators: int) -> "GroupSet":
        """Returns the set of a generator that has committed nothing."""
        return cls(num_generators=num_generators, last=generator - num_generators)

    def __contains__(self, group_id: int) -> bool:
        return group_id <= self.last and group_id not in self.missing

    def add(self, group_id: int) -> None:
        """Raises ValueError if the group was added already or belongs to another generator."""
        if (group_id - self.last) % self.num_generators:
            raise ValueError(f"group {group_id} belongs to another generator")
        if group_id in self:
            raise ValueError(f"group {group_id} appears a second time: a prompt was repeated")
        self.missing |= set(range(self.last + self.num_generators, group_id, self.num_generators))
        self.missing.discard(group_id)
        self.last = max(self.last, group_id)

    def to_generate(self) -> Iterator[int]:
        """Yields the missing groups, ascending, then all groups after the last, without end."""
        return chain(sorted(self.missing), count(self.last + self.num_generators, self.num_generators))


def committed_groups(
    store: Store, generator: int, num_generators: int, lineage: Lineage, until: LogCursor | None = None
) -> GroupSet:
    """Reads the generator's groups whose weights are of this lineage, up to `until` in its stream (default: the head).

    Raises StreamCorrupt.
    """
    path = layout.trajectories(generator)
    for record in backwards(store, path, stream_head(store, path) if until is None else until):
        if record.kind != "data":
            continue
        if lineage.holds(record.incarnation, record.max_policy_version):
            return GroupSet(
                num_generators=num_generators, last=record.last_group_id, missing=set(record.missing_groups)
            )
    return GroupSet.empty(generator, num_generators)


def pass_part(groups: GroupSet, path: str, record: Record, group_ids: Iterable[int] | None) -> None:
    """Adds the groups of a part whose weights exist; `group_ids` is None if its rows can't be read.

    Raises LedgerMismatch, naming the rows, if a prompt was repeated or skipped.
    """
    where = f"{path}, rows {record.first_row_id} to {record.first_row_id + record.rows - 1}"
    if group_ids is None:
        group_ids = record.group_ids
    try:
        for group_id in group_ids:
            groups.add(group_id)
    except ValueError as error:
        raise LedgerMismatch(f"{where}: {error}") from error
    expected = (record.last_group_id, set(record.missing_groups))
    if (groups.last, groups.missing) != expected:
        differing = sorted((groups.missing ^ expected[1]) | ({groups.last} ^ {expected[0]}))
        raise LedgerMismatch(
            f"{where}: the record and the parts before it disagree about groups {differing}: a prompt was skipped"
        )
