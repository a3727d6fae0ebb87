"""The ledger: where every trajectory went, counted in trajectories (stored as `rollouts`) and in response tokens.

    generated = trained + dropped + buffered + in flight

    ║ trajectories ║ ──in flight──► ║ annotations ║ ──buffered──► consumed ─┬─► trained
                                                                            └─► dropped, by reason

Trained tokens that are too old to be trainable are counted as `masked` too.

A trajectory is scored once all pools of scorers and teachers have passed it. `generated` and `scored` are sums over
commit records. Consumption is counted twice: by the position of the trainer's
stream cursors, and by the `Account` that it keeps trajectory by trajectory. The two must agree at every step and after
every restart. Otherwise the run stops and names the rows that they disagree about.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.stored import AnnotatorPools
from millrace.errors import LedgerMismatch
from storage import layout
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.streams.log import LogReader, check_no_hole


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """A number of trajectories, and the response tokens in them."""

    rollouts: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(rollouts=self.rollouts + other.rollouts, tokens=self.tokens + other.tokens)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(rollouts=self.rollouts - other.rollouts, tokens=self.tokens - other.tokens)

    def to_json(self) -> dict[str, int]:
        """JSON for `from_json`."""
        return {"rollouts": self.rollouts, "tokens": self.tokens}

    @classmethod
    def from_json(cls, values: dict[str, int]) -> "Amount":
        """The inverse of `to_json`."""
        return cls(**values)


@dataclass(kw_only=True)
class Account:
    """Counts how the trainer used the trajectories that it consumed. Part of every checkpoint."""

    trained: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    """By drop_reason."""
    groups_dropped: int = 0
    """Whole groups dropped for good. Each makes room for another under the staleness bound."""
    by_generator: dict[int, Amount] = field(default_factory=dict)
    """Everything consumed, by generator."""
    masked: Amount = field(default_factory=Amount)
    """Trained trajectories that have masked tokens, and the number of these tokens."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained trajectories by their staleness when consumed, policy versions."""
    reward_sums: dict[str, float] = field(default_factory=dict)
    """Sum of the rewards, by drop_reason or `trained`: shows whether drops are biased."""
    generated: Amount = field(default_factory=Amount, compare=False)
    """Committed to trajectory streams; this and the next two as of the last `balance`."""
    buffered: Amount = field(default_factory=Amount, compare=False)
    """Scored, and not yet consumed by the trainer."""
    in_flight: Amount = field(default_factory=Amount, compare=False)
    """Committed, and not yet scored."""

    def train(
        self, amount: Amount, *, generator: int, staleness: int, reward_sum: float, masked: Amount | None = None
    ) -> None:
        """Counts trajectories of one staleness that an optimizer step used; `masked` is part of them."""
        self._take(generator, amount)
        self.trained += amount
        self.masked += masked or Amount()
        self.staleness[staleness] += amount.rollouts
        self.reward_sums["trained"] = self.reward_sums.get("trained", 0.0) + reward_sum

    def drop(self, reason: str, amount: Amount, *, generator: int, reward_sum: float) -> None:
        """Counts trajectories that were consumed and not trained."""
        self._take(generator, amount)
        self.dropped[reason] = self.dropped.get(reason, Amount()) + amount
        self.reward_sums[reason] = self.reward_sums.get(reason, 0.0) + reward_sum

    def taken(self) -> Amount:
        """Everything accounted for."""
        return sum(self.dropped.values(), self.trained)

    def _take(self, generator: int, amount: Amount) -> None:
        self.by_generator[generator] = self.by_generator.get(generator, Amount()) + amount

    def balance(
        self, *, generated: Amount, scored: Amount, consumed: Sequence[Amount], balanced: Sequence[Amount] = ()
    ) -> None:
        """Checks the account against the streams, and sets where the trajectories are that it does not have yet.

        `generated` and `scored` are sums over the commit records of trajectories and annotations. `consumed` is the
        position of the trainer's cursors by generator, and `balanced` their position when the account last balanced.
        Raises LedgerMismatch, which names the rows that the account and the cursors disagree about.
        """
        for generator, passed in enumerate(consumed):
            since = balanced[generator] if balanced else Amount()
            _check_generator(generator, passed, self.by_generator.get(generator, Amount()), since)
        total = sum(consumed, Amount())
        if self.taken() != total:
            raise LedgerMismatch(
                f"the account has {total} by generator, but {self.taken()} by outcome: "
                f"trained {self.trained}, dropped {self.dropped}"
            )
        self.generated, self.buffered, self.in_flight = generated, scored - total, generated - scored
        for name, amount in (("buffered", self.buffered), ("in flight", self.in_flight)):
            if amount.rollouts < 0 or amount.tokens < 0:
                raise LedgerMismatch(
                    f"{amount.rollouts} trajectories ({amount.tokens} tokens) {name}: more was consumed than generated"
                )

    def ledger(self) -> dict[str, Any]:
        """The `ledger` section of a summary: the places that every generated trajectory is in one of."""
        amounts = ("generated", "trained", "masked", "buffered", "in_flight")
        dropped = {reason: amount.to_json() for reason, amount in sorted(self.dropped.items())}
        return {**{name: getattr(self, name).to_json() for name in amounts}, "dropped": dropped}

    def to_json(self) -> dict[str, Any]:
        """JSON for `from_json`."""
        return {
            "trained": self.trained.to_json(),
            "dropped": {reason: amount.to_json() for reason, amount in sorted(self.dropped.items())},
            "groups_dropped": self.groups_dropped,
            "masked": self.masked.to_json(),
            "by_generator": {str(g): amount.to_json() for g, amount in sorted(self.by_generator.items())},
            "staleness": {str(staleness): count for staleness, count in sorted(self.staleness.items())},
            "reward_sums": dict(sorted(self.reward_sums.items())),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Account":
        """The inverse of `to_json`."""
        return cls(
            trained=Amount.from_json(values["trained"]),
            dropped={reason: Amount.from_json(amount) for reason, amount in values["dropped"].items()},
            groups_dropped=values["groups_dropped"],
            masked=Amount.from_json(values["masked"]),
            by_generator={int(g): Amount.from_json(amount) for g, amount in values["by_generator"].items()},
            staleness=Counter({int(staleness): count for staleness, count in values["staleness"].items()}),
            reward_sums=dict(values["reward_sums"]),
        )


def _check_generator(generator: int, passed: Amount, counted: Amount, since: Amount) -> None:
    # Rows of a stream are numbered from 0 without gaps, so an amount is also a position.
    if passed == counted:
        return
    first, last = since.rollouts, max(passed.rollouts, counted.rollouts) - 1
    cursor, account = passed - since, counted - since
    raise LedgerMismatch(
        f"{layout.trajectories(generator)}, rows {first} to {last}: the trainer's cursor passed {cursor.rollouts} "
        f"trajectories ({cursor.tokens} tokens) of them, but its account has {account.rollouts} ({account.tokens})"
    )


class CommittedAmounts:
    """How much all generators and annotators of a run have committed. Each look reads only the new commit records.

    `trajectories` are the readers of the generators' logs. Making one raises StreamCorrupt for a damaged record, or one
    that is missing.
    """

    def __init__(self, store: Store, *, pools: AnnotatorPools, num_generators: int) -> None:
        self.trajectories = [log_at_head(store, layout.trajectories(g)) for g in range(num_generators)]
        self._scored = [
            [[log_at_head(store, layout.annotations(pool, g, s, count)) for s in range(count)]
             for pool, count in pools.replicas.items()]
            for g in range(num_generators)
        ]  # fmt: skip

    def look(self) -> tuple[Amount, Amount]:
        """(generated, scored) so far. Scored is read first, so it never exceeds generated. Raises StreamCorrupt."""
        scored = sum((amount_scored(map(amount_committed, pools)) for pools in self._scored), Amount())
        generated = amount_committed(self.trajectories)
        check_scored(generated, scored)
        return generated, scored


def log_at_head(store: Store, path: str) -> LogReader:
    """A reader behind all that a log holds. Raises StreamCorrupt, also for a record that is missing before later ones.

    Without that, what comes after it would count as never generated, or never scored.
    """
    reader = LogReader.at_head(store, path)
    check_no_hole(store, path, reader.cursor)
    return reader


def check_scored(generated: Amount, scored: Amount) -> None:
    """Raises StreamCorrupt if more trajectories are scored than there are records of: the newest records are gone."""
    if scored.rollouts > generated.rollouts:
        raise StreamCorrupt(
            layout.TRAJECTORIES,
            f"its records hold {generated.rollouts} trajectories, but {scored.rollouts} are scored: its newest records "
            "are gone; restore them from a copy of the run",
        )


def amount_scored(by_pool: Iterable[Amount]) -> Amount:
    """How much of a generator's trajectories all pools have passed, from the amount that each has."""
    return min(by_pool, key=lambda amount: amount.rollouts)


def amount_committed(readers: Sequence[LogReader]) -> Amount:
    """The amount of everything committed to these logs so far. Reads only the new records."""
    heads = [reader.to_head() for reader in readers]
    return Amount(rollouts=sum(head.rows for head in heads), tokens=sum(head.tokens for head in heads))
