"""How many copies the trainer sends itself, and how many the generators hand on.

    trainer ─┬─► generator 0 ─► generator 1 ─► generator 2        a chain: each worker hands each bucket on to the same
             └─► generator 3 ─► generator 4                       worker of the next generator while it gets another

With c chains of k generators, in bytes at the rate of a link:

    max(F, R) + F / 4 + (⌈k / c⌉ − 1) · bucket          F = c · S / T + others

S is what all workers of a generator need and T the number of trainer ranks, so F is what a trainer rank sends; `others`
goes to generators of another layout. R is what the busiest worker gets, and hands on meanwhile. F counts again, by a
quarter, because the trainer trains on and its links are needed for that. The last summand fills the pipeline. So many
trainer ranks feed several chains, and a single rank feeds one.
"""

from collections.abc import Sequence

_TRAINERS_LINKS = 1 / 4
"""What it costs that a trainer's link is in use, as a share of the same time at the end of a push."""


def num_chains(
    *, generators: int, trainers: int, needed: int, most_received: int, others: float, bucket_bytes: int
) -> int:
    """The cheapest number of chains, in [1, generators]; the smallest of equally cheap ones.

    `needed` and `most_received` are bytes: of all workers of a generator, and of its busiest one. `others` is bytes of
    each trainer rank.
    """

    def cost(chains: int) -> float:
        hand_overs = -(-generators // chains) - 1
        fed = chains * needed / trainers + others
        return max(fed, float(most_received)) + fed * _TRAINERS_LINKS + hand_overs * min(bucket_bytes, most_received)

    return min(range(1, generators + 1), key=cost)


def chains_of(generators: Sequence[int], num: int) -> tuple[tuple[int, ...], ...]:
    """The generators in `num` chains whose lengths differ by at most one."""
    return tuple(tuple(generators[index::num]) for index in range(num))
