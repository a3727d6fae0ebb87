"""How much the generators and scorers of a run have committed: sums over commit records, no rows read."""

from millrace.ledger import Amount
from storage import layout
from storage.log import LogReader
from storage.store import Store


def committed(store: Store, *, reward: str, num_generators: int, num_scorers: int) -> "CommittedAmounts":
    """A reader of how much all generators and scorers of a run have committed."""
    return CommittedAmounts(
        generated=[LogReader.at_head(store, layout.trajectories(g)) for g in range(num_generators)],
        scored=[
            LogReader.at_head(store, layout.scores(reward, g, s, num_scorers))
            for g in range(num_generators)
            for s in range(num_scorers)
        ],
    )


class CommittedAmounts:
    """Sums over commit records; each look reads only the records that are new."""

    def __init__(self, generated: list[LogReader], scored: list[LogReader]) -> None:
        self._generated = generated
        self._scored = scored

    def look(self) -> tuple[Amount, Amount]:
        """(generated, scored) so far. Scored is read first, so it never exceeds generated."""
        scored = amount_committed(self._scored)
        return amount_committed(self._generated), scored


def amount_committed(readers: list[LogReader]) -> Amount:
    """Rollouts and tokens of everything committed to these logs so far; reads only the records that are new."""
    heads = [reader.to_head() for reader in readers]
    return Amount(rollouts=sum(head.rows for head in heads), tokens=sum(head.tokens for head in heads))
