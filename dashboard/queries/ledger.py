"""Whether every trajectory is accounted for, and which were not trained on.

the trainer's account, in its sign of life ─┐
                                            ├─► told twice: by outcome, by generator
rows of the consumed stream, counted       ─┘
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dashboard.data import RunData
from dashboard.queries.learning import TRAINER
from millrace.consumed import TRAINED
from millrace.ledger import Account, Amount

MOST_DROPS = 50
_SAME = ("policy_version", "generator", "group_id", "outcome", "staleness")
"""What the rows of one Drop have in common."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One amount as the account has it, and as the rows of the consumed stream add up to it."""

    of: str
    """Outcome or generator."""
    account: Amount
    recount: Amount


@dataclass(frozen=True, kw_only=True)
class ToldTwice:
    """The trainer's account beside a recount of the rows behind it."""

    policy_version: int
    """As of which both stand."""
    behind: int
    """Steps that the consumed stream, committed once a second, does not have yet. While it is behind, a recount may be
    short of the account."""
    entries: tuple[Entry, ...]

    @property
    def agrees(self) -> bool:
        """Whether both tell the same; while the stream is behind, whether no recount exceeds the account."""
        return all(
            entry.account == entry.recount or (self.behind > 0 and _within(entry.recount, entry.account))
            for entry in self.entries
        )


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Rows next to each other in a generator's stream, of one group, that were dropped for one reason."""

    policy_version: int
    """That the step made for which they were taken."""
    generator: int
    first_row: int
    last_row: int
    group: int
    """-1 where its part can't be read."""
    reason: str
    staleness: int
    """Policy versions."""


def told_twice(run: RunData) -> ToldTwice | None:
    """None until the trainer has said what it did."""
    life = run.lives.get(TRAINER, {})
    if "account" not in life:
        return None
    account, version = Account.from_json(life["account"]), int(life["policy_version"])
    versions = run.consumed["policy_version"]
    newest = int(versions[-1]) if len(versions) else 0
    # Rows of steps ascend. The sign of life may be older than the stream.
    end = int(np.searchsorted(versions, version, side="right"))
    by_outcome = {run.outcomes[code]: amount for code, amount in _amounts(run, "outcome", end).items()}
    by_generator = _amounts(run, "generator", end)
    told = {TRAINED: account.trained, **account.dropped}
    entries = [
        Entry(of=name, account=told.get(name, Amount()), recount=by_outcome.get(name, Amount()))
        for name in dict.fromkeys([*told, *by_outcome])
    ]
    entries += [
        Entry(
            of=f"generate-{generator}",
            account=account.by_generator.get(generator, Amount()),
            recount=by_generator.get(generator, Amount()),
        )
        for generator in sorted({*account.by_generator, *by_generator})
    ]
    return ToldTwice(policy_version=version, behind=max(0, version - newest), entries=tuple(entries))


def newest_drops(run: RunData) -> list[Drop]:
    """The last 50, newest first."""
    at = np.flatnonzero(~run.trained)
    columns = {name: run.consumed[name][at] for name in (*_SAME, "trajectory_row_id")}
    changed = np.diff(columns["trajectory_row_id"]) != 1
    for name in _SAME:
        changed |= np.diff(columns[name]) != 0
    starts = np.append(0, np.flatnonzero(changed) + 1)[-MOST_DROPS:] if len(at) else at
    ends = np.append(starts[1:], len(at))
    return [_drop(run, columns, start, end - 1) for start, end in zip(starts, ends, strict=False)][::-1]


def _drop(run: RunData, columns: dict[str, npt.NDArray[np.int64]], first: int, last: int) -> Drop:
    value = {name: int(columns[name][first]) for name in _SAME}
    return Drop(
        policy_version=value["policy_version"],
        generator=value["generator"],
        first_row=int(columns["trajectory_row_id"][first]),
        last_row=int(columns["trajectory_row_id"][last]),
        group=value["group_id"],
        reason=run.outcomes[value["outcome"]],
        staleness=value["staleness"],
    )


def _amounts(run: RunData, column: str, end: int) -> dict[int, Amount]:
    """Rollouts and tokens of the first `end` rows, by the value of `column`, as far as it occurs."""
    values, tokens = run.consumed[column][:end], run.consumed["tokens"][:end]
    rollouts, sums = np.bincount(values), np.bincount(values, tokens)
    return {value: Amount(rollouts=int(rollouts[value]), tokens=int(sums[value])) for value in np.flatnonzero(rollouts)}


def _within(part: Amount, whole: Amount) -> bool:
    return part.rollouts <= whole.rollouts and part.tokens <= whole.tokens
