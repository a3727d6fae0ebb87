"""Which groups of each generator are there: for the generator that resumes, and for the trainer that checks.

    own groups        0   2   4   6   8   10  12          generator 0 of 2; 4 and 8 are still in flight
    committed         ■   ■       ■       ■               last: 10, missing: 4, 8
    after a restart           4       8       12, 14, …   the missing ones first, then the next ones

Groups are admitted in order and finish in any order. Each commit record says what is there up to its part: the highest
group, and those before it that are missing. So the newest record whose weights exist tells a generator where to go on:
no prompt is skipped, and none is asked twice. The trainer adds up the parts it reads, and must find the same.

    own stream, incarnation 0   … ║ v19 ║ v20 ║ v21 ║ v22 ║ …           the trainer was rolled back to v20 and is now 1
                                          └────────┐
    own stream, incarnation 1                      ║ v20 ║ v21' ║ …     the groups of v21 and v22 are made once more

Groups that the trainer refuses, because their policy was rolled back, are generated again under the same numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice

from millrace.errors import LedgerMismatch
from millrace.rollouts.lineage import Lineage
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogCursor, backwards
from storage.streams.record import Record
from storage.streams.stream import read_part, stream_head


@dataclass(kw_only=True)
class GroupSet:
    """The groups of one generator that are there: all its numbers up to `last`, except the `missing` ones."""

    num_generators: int
    """The generator's numbers are this far apart."""
    last: int
    """The highest group; the generator's first number minus `num_generators` while there is none."""
    missing: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, generator: int, num_generators: int) -> "GroupSet":
        """No group yet."""
        return cls(num_generators=num_generators, last=generator - num_generators)

    def __contains__(self, group_id: int) -> bool:
        return group_id <= self.last and group_id not in self.missing

    def add(self, group_id: int) -> None:
        """Raises ValueError if the group is there already, or belongs to another generator."""
        if (group_id - self.last) % self.num_generators:
            raise ValueError(f"group {group_id} belongs to another generator")
        if group_id in self:
            raise ValueError(f"group {group_id} is there a second time: a prompt was repeated")
        self.missing |= set(range(self.last + self.num_generators, group_id, self.num_generators))
        self.missing.discard(group_id)
        self.last = max(self.last, group_id)

    def lacking(self) -> Iterator[int]:
        """Without end, as of now: the missing groups, ascending, then those after the last."""
        return chain(sorted(self.missing), count(self.last + self.num_generators, self.num_generators))


def committed_groups(
    store: Store, generator: int, num_generators: int, lineage: Lineage, until: LogCursor | None = None
) -> GroupSet:
    """The generator's groups whose weights are of this lineage, from its own stream up to `until` (default: its head).

    Raises StreamCorrupt.
    """
    path = layout.trajectories(generator)
    for record in backwards(store, path, stream_head(store, path) if until is None else until):
        if record.kind != "data":
            continue
        incarnation, last_group_id = record.incarnation, record.last_group_id
        if record.schema_version < 2:
            incarnation, last_group_id = _read(store, path, record)
        if lineage.holds(incarnation, record.max_policy_version):
            # Before schema version 3 groups were committed in order, so that none is missing.
            return GroupSet(num_generators=num_generators, last=last_group_id, missing=set(record.missing_groups))
    return GroupSet.empty(generator, num_generators)


def _read(store: Store, path: str, record: Record) -> tuple[int, int]:
    """(incarnation, last group) of a part from before schema version 2, whose record does not hold them."""
    last = read_part(store, path, TRAJECTORY, record, columns=["incarnation", "group_id"]).slice(record.rows - 1)
    return last["incarnation"][0].as_py(), last["group_id"][0].as_py()


def pass_part(groups: GroupSet, path: str, record: Record, group_ids: Iterable[int] | None) -> None:
    """Adds the groups of a part whose weights exist; `group_ids` is None if its rows can't be read.

    Raises LedgerMismatch, naming the rows, if a prompt was repeated or skipped: a group is there already, or the record
    lacks one that is not there.
    """
    where = f"{path}, rows {record.first_row_id} to {record.first_row_id + record.rows - 1}"
    if group_ids is None:
        group_ids = record.group_ids or _in_order(groups, record)
    try:
        for group_id in group_ids:
            groups.add(group_id)
    except ValueError as error:
        raise LedgerMismatch(f"{where}: {error}") from error
    expected = (record.last_group_id, set(record.missing_groups))
    if record.schema_version >= 3 and (groups.last, groups.missing) != expected:
        differing = sorted((groups.missing ^ expected[1]) | ({groups.last} ^ {expected[0]}))
        raise LedgerMismatch(
            f"{where}: the record and the parts before it disagree about groups {differing}: a prompt was skipped"
        )
    if record.schema_version == 2 and groups.missing:
        raise LedgerMismatch(f"{where}: groups {sorted(groups.missing)} are missing before it: a prompt was skipped")


def _in_order(groups: GroupSet, record: Record) -> list[int]:
    """The groups of an unreadable part from before schema version 3, when they were committed in order."""
    return list(islice(groups.lacking(), record.rows // max(1, record.group_size)))
