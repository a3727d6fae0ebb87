"""The plan of a push: who sends which bytes to whom, in which order.

    trainer rank ──► worker of a chain's first generator ──► same worker of the next generator ──► …
       └ its part of each tensor: division.py     └ every message handed on as it came: chains.py

schedule.py says when each trainer rank sends to each first worker. A worker hands a message on when its line gets the
next one. All ranks do their hops in the order of these times: even if sends and receives block, nobody waits in a
circle, and nobody holds more than two messages.

What takes time in proportion to the number of hops is done only when `hops` is called. All else works on tensors that
are divided alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import xxhash

from millrace.weights.transfer.division import Ints
from millrace.weights.transfer.family import Family, families_of
from millrace.weights.transfer.layout import Layout
from millrace.weights.transfer.messages import ALIGN, Hop, Message, pack
from millrace.weights.transfer.schedule import starts

_VERSION = 1
"""Of the algorithm: processes with another must not agree on a digest."""


def plan_transfer(
    source: Layout, generators: Sequence[Layout], *, bucket_bytes: int, alone_bytes: int | None = None
) -> "TransferPlan":
    """Plans a push from the trainer's ranks to the workers of all generators.

    Ranks of the push are the trainer's, then the workers of generator 0, of generator 1, and so on. Tensors travel in
    the order of `source`, but regions of at least `alone_bytes` first and in messages of their own (`messages.py`). The
    same arguments give the same plan in every process.
    Raises WeightsMismatch, naming the generator and a tensor, if the trainer does not have what a generator needs, and
    ValueError for buckets of less than 16 bytes.
    """
    if bucket_bytes < ALIGN:
        raise ValueError(f"buckets of {bucket_bytes} bytes; expected at least {ALIGN}")
    families = families_of(source, generators, bucket_bytes=bucket_bytes)
    return TransferPlan(source, tuple(generators), families, bucket_bytes, alone_bytes)


@dataclass(frozen=True)
class TransferPlan:
    """Made by `plan_transfer`."""

    source: Layout
    generators: tuple[Layout, ...]
    families: tuple[Family, ...]
    bucket_bytes: int
    alone_bytes: int | None

    @property
    def size(self) -> int:
        """Ranks of the push: trainer ranks and workers."""
        return self.source.size + sum(layout.size for layout in self.generators)

    @cached_property
    def digest(self) -> str:
        """XXH3 (128 bits, hex) of everything that the plan depends on."""
        state = xxhash.xxh3_128(f"{_VERSION} {self.bucket_bytes} {self.alone_bytes} {self.source.size}\n".encode())
        for layout in (self.source, *(family.layout for family in self.families)):
            state.update(repr(layout.to_json()).encode())
        state.update(repr([family.chains for family in self.families]).encode())
        return state.hexdigest()

    def rank_of(self, generator: int, worker: int) -> int:
        """The rank in the push of a generator's worker."""
        return self._first_ranks[generator] + worker

    def hops(self, rank: int) -> list[Hop]:
        """What this rank sends and receives, in the order in which it has to.

        Takes time in proportion to the slices in these messages.
        """
        if rank < self.source.size:
            return self._trainer_hops(rank)
        generator = int(np.searchsorted(self._first_ranks, rank, side="right")) - 1
        return self._worker_hops(generator, rank - self._first_ranks[generator])

    @cached_property
    def sent(self) -> Ints:
        """[ranks] bytes of tensors that each rank sends; without what alignment leaves unused in messages."""
        sent = np.zeros(self.size, dtype=np.int64)
        for family in self.families:
            sent[: self.source.size] += family.sent.sum(axis=1)
            for chain in family.chains:
                for generator in chain[:-1]:
                    first = self.rank_of(generator, 0)
                    sent[first : first + family.layout.size] += family.received
        return sent

    @cached_property
    def received(self) -> Ints:
        """[ranks] bytes of tensors that each rank receives."""
        received = np.zeros(self.size, dtype=np.int64)
        for family in self.families:
            for chain in family.chains:
                for generator in chain:
                    first = self.rank_of(generator, 0)
                    received[first : first + family.layout.size] = family.received
        return received

    @property
    def sent_balance(self) -> float:
        """What the busiest trainer rank sends, divided by the mean of all."""
        return _balance(self.sent[: self.source.size])

    @property
    def received_balance(self) -> float:
        """What the busiest worker receives, divided by the mean of all."""
        return _balance(self.received[self.source.size :])

    @cached_property
    def span(self) -> int:
        """Bytes that a link carries from the start of a push to its end, if all links are alike and only bytes count.

        Takes time in proportion to the pairs of trainer ranks and first workers.
        """
        if not self.families:
            return 0
        ends = self._starts + np.concatenate([family.sent for family in self.families], axis=1)
        fill = max(
            (max(map(len, family.chains)) - 1) * min(self.bucket_bytes, int(family.received.max()))
            for family in self.families
        )
        return int(ends.max()) + fill

    @cached_property
    def _first_ranks(self) -> list[int]:
        sizes = [layout.size for layout in self.generators]
        return [self.source.size + before for before in accumulate(sizes, initial=0)]

    @cached_property
    def _first_workers(self) -> list[int]:
        """The number d of each family's first destination."""
        counts = [len(family.chains) * family.layout.size for family in self.families]
        return list(accumulate(counts, initial=0))

    @cached_property
    def _starts(self) -> Ints:
        """[trainer ranks, first workers] when each pair begins."""
        return starts(np.concatenate([family.sent for family in self.families], axis=1))

    def _fed(self, source: int, index: int, chain: int, worker: int) -> Iterator[tuple[int, Message]]:
        """(round, message) of all that a trainer rank sends to a worker of the first generator of a family's chain."""
        family, num_workers = self.families[index], self._first_workers[-1]
        target = self._first_workers[index] + chain * family.layout.size + worker
        when = int(self._starts[source, target])
        packed = pack(family.regions(source, chain, worker), self.bucket_bytes, self.alone_bytes)
        for k, (slices, nbytes, payload) in enumerate(packed):
            number = (k * self.source.size + source) * num_workers + target
            yield when, Message(number, slices, nbytes)
            when += payload

    def _senders(self, index: int, chain: int, worker: int) -> list[int]:
        """The trainer ranks that send anything to this worker of a family's chain."""
        sent = self.families[index].sent[:, chain * self.families[index].layout.size + worker]
        return [int(source) for source in np.flatnonzero(sent)]

    def _trainer_hops(self, rank: int) -> list[Hop]:
        hops = [
            Hop(rank, self.rank_of(chain[0], worker), message, when)
            for index, family in enumerate(self.families)
            for number, chain in enumerate(family.chains)
            for worker in range(family.layout.size)
            for when, message in self._fed(rank, index, number, worker)
        ]
        return sorted(hops, key=lambda hop: hop.round)

    def _worker_hops(self, generator: int, worker: int) -> list[Hop]:
        index, number = next(
            (index, number)
            for index, family in enumerate(self.families)
            if (number := family.chain_of(generator)) is not None
        )
        chain = self.families[index].chains[number]
        line = [self.rank_of(member, worker) for member in chain]
        place = chain.index(generator)
        fed = [
            (when, source, message)
            for source in self._senders(index, number, worker)
            for when, message in self._fed(source, index, number, worker)
        ]
        fed.sort(key=lambda one: one[0])
        # The line goes on after the last message from the trainer, until that has reached the end.
        rounds = [when for when, _, _ in fed]
        rounds += [rounds[-1] + after for after in range(1, len(line))] if rounds else []
        hops = []
        for at in range(len(fed) + 1):
            # In a round first what it has, then what comes.
            if at > 0 and place + 1 < len(line):
                hops.append(Hop(line[place], line[place + 1], fed[at - 1][2], rounds[at + place]))
            if at < len(fed):
                before = line[place - 1] if place else fed[at][1]
                hops.append(Hop(before, line[place], fed[at][2], rounds[at + place]))
        return hops


def _balance(nbytes: Ints) -> float:
    """1 if nobody has anything."""
    return float(nbytes.max() / nbytes.mean()) if nbytes.any() else 1.0
