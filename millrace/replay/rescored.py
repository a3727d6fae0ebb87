"""What another reward says of stored trajectories, beside what the first one said.

║ trajectories ║ part k ─┐
║ scores ║  old, part k ─┼─► row by row: agreed? rose? fell? ─► totals, by the prompts' source; every row that changed
║ scores ║  new, part k ─┘
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from millrace.replay.stored import StoredRun
from storage import layout
from storage.errors import PartCorrupt, PartRemoved
from storage.schema import SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import Part, StreamReader

CHANGED = pa.schema(
    [
        ("generator", pa.int32()),
        ("trajectory_row_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("old_reward", pa.float32()),
        ("new_reward", pa.float32()),
    ]
)
"""A row for each trajectory of which the two rewards say different things; null: that verifier failed."""


@dataclass(kw_only=True)
class Difference:
    """Two rewards of the same trajectories."""

    rows: int = 0
    """Scored by both."""
    agreed: int = 0
    """With equal rewards, or both failed."""
    rose: int = 0
    fell: int = 0
    """Rows whose new reward is higher, and lower."""
    old_failed: int = 0
    new_failed: int = 0
    """Rows on which a verifier came to no result."""
    old_sum: float = 0.0
    new_sum: float = 0.0
    """Of the rewards of the rows on which neither failed."""

    @property
    def agreement(self) -> float:
        """Share of the rows, in [0, 1]; NaN where there is none."""
        return self.agreed / self.rows if self.rows else math.nan

    @property
    def shift(self) -> float:
        """How much higher the mean reward is, where neither failed; NaN where there is none."""
        known = self.rows - self.old_failed - self.new_failed
        return (self.new_sum - self.old_sum) / known if known > 0 else math.nan

    def add(self, old: float | None, new: float | None) -> bool:
        """Counts one row; whether the two agree."""
        self.rows += 1
        self.old_failed += old is None
        # A row on which both failed counts once in `known`.
        self.new_failed += new is None and old is not None
        agreed = old == new
        self.agreed += agreed
        if old is not None and new is not None:
            self.rose += new > old
            self.fell += new < old
            self.old_sum += old
            self.new_sum += new
        return agreed


@dataclass(kw_only=True)
class Rescored:
    """What came of scoring a stored run anew."""

    old_reward: str
    new_reward: str
    total: Difference = field(default_factory=Difference)
    by_source: dict[str, Difference] = field(default_factory=dict)
    """By the source that the prompts name."""
    unread: list[str] = field(default_factory=list)
    """Parts that could not be compared, a sentence each."""
    changed: pa.Table = field(default_factory=lambda: CHANGED.empty_table())

    def to_json(self) -> dict[str, Any]:
        """Everything but the rows that changed."""
        return {
            "old_reward": self.old_reward,
            "new_reward": self.new_reward,
            "total": _difference_json(self.total),
            "by_source": {source: _difference_json(one) for source, one in sorted(self.by_source.items())},
            "unread": self.unread,
        }


def compare_scores(run: StoredRun, store: Store, reward: str, num_scorers: int) -> Rescored:
    """The scores that `run` was trained with, beside those of `reward` that `num_scorers` scorers put into `store`."""
    found = Rescored(old_reward=run.config["scoring"]["reward"], new_reward=reward)
    changed: list[dict[str, Any]] = []
    for generator in range(run.config["generation"]["replicas"]):
        for trajectories, old, new in _aligned(run, store, generator, reward, num_scorers, found.unread):
            changed += _count(found, generator, trajectories, old, new)
    found.changed = pa.Table.from_pylist(changed, schema=CHANGED)
    return found


def _count(found: Rescored, generator: int, *parts: pa.Table) -> list[dict[str, Any]]:
    trajectories, old, new = parts
    changed = []
    for row, before, after in zip(
        trajectories.to_pylist(), old["reward"].to_pylist(), new["reward"].to_pylist(), strict=True
    ):
        source = str(json.loads(row["meta"]).get("source"))
        found.by_source.setdefault(source, Difference()).add(before, after)
        if not found.total.add(before, after):
            changed.append(
                {
                    "generator": generator,
                    "trajectory_row_id": row["row_id"],
                    "group_id": row["group_id"],
                    "prompt_id": row["prompt_id"],
                    "source": source,
                    "old_reward": before,
                    "new_reward": after,
                }
            )
    return changed


def _aligned(
    run: StoredRun, store: Store, generator: int, reward: str, num_scorers: int, unread: list[str]
) -> Iterator[tuple[pa.Table, pa.Table, pa.Table]]:
    """Trajectories with both their scores, part by part, as far as all three go."""
    scoring = run.config["scoring"]
    columns = ["row_id", "group_id", "prompt_id", "meta"]
    trajectories = StreamReader(run.store, layout.trajectories(generator), TRAJECTORY, columns=columns)
    old = _scores(run.store, scoring["reward"], generator, scoring["replicas"])
    new = _scores(store, reward, generator, num_scorers)
    while True:
        number = trajectories.cursor.part
        readers = [trajectories, old[number % len(old)], new[number % len(new)]]
        parts: list[Part | None] = []
        for reader in readers:
            try:
                parts.append(reader.next())
            except (PartCorrupt, PartRemoved) as error:
                unread.append(str(error))
                reader.next_record()
                parts.append(None)
                continue
            if parts[-1] is None:
                return
        tables = [part.table for part in parts if part is not None]
        if len(tables) == len(readers):
            yield tables[0], tables[1], tables[2]


def _scores(store: Store, reward: str, generator: int, num_scorers: int) -> list[StreamReader]:
    paths = [layout.scores(reward, generator, scorer, num_scorers) for scorer in range(num_scorers)]
    return [StreamReader(store, path, SCORE, columns=["row_id", "reward"]) for path in paths]


def _difference_json(difference: Difference) -> dict[str, Any]:
    derived = {"agreement": difference.agreement, "shift": difference.shift}
    return asdict(difference) | {name: None if math.isnan(value) else value for name, value in derived.items()}
