"""When each trainer rank sends to each worker, if both can do one thing at a time.

    rank 0 ─ to worker 1 ───── to worker 0 ── to worker 2 ─
    rank 1 ─ to worker 0 ─ to worker 2 ─────── to worker 1 ─

An open shop: each pair is a job that occupies its rank and its worker for as long as its bytes take. Whenever both ends
of a job are free, one starts; of several, the one whose other end has most left to do, or the next one in a circle.
Nothing can end before the busiest rank or worker is done. Random sizes took at most 1.3 times as long as that, with 64
ranks 1.02 times, and equal sizes no longer.
"""

import heapq

import numpy as np

from millrace.weights.transfer.division import Ints


def starts(nbytes: Ints) -> Ints:
    """[ranks, workers] when each pair starts, in bytes that a link has carried by then; `nbytes` has the same shape.

    Pairs without bytes have no meaningful start.
    """
    shop = _Shop(nbytes)
    for rank in np.argsort(-shop.of_rank, kind="stable"):
        shop.start_of_rank(int(rank))
    while shop.running:
        now = shop.running[0][0]
        ended = []
        while shop.running and shop.running[0][0] == now:
            ended.append(shop.end_first())
        for rank, worker in ended:
            # The one with more to do chooses first.
            if shop.of_rank[rank] >= shop.of_worker[worker]:
                shop.start_of_rank(rank)
                shop.start_of_worker(worker)
            else:
                shop.start_of_worker(worker)
                shop.start_of_rank(rank)
    return shop.starts


class _Shop:
    """What has started, what is running, and what is left."""

    def __init__(self, nbytes: Ints) -> None:
        self._nbytes = nbytes
        self._waiting = nbytes > 0
        self.of_rank = nbytes.sum(axis=1)
        """[ranks] bytes that each has not started to send."""
        self.of_worker = nbytes.sum(axis=0)
        """[workers] bytes that each has not started to receive."""
        self._idle_ranks = np.ones(len(nbytes), dtype=bool)
        self._idle_workers = np.ones(nbytes.shape[1], dtype=bool)
        self._last_worker = np.arange(len(nbytes)) - 1
        self._last_rank = np.arange(nbytes.shape[1]) + 1
        self.starts = np.zeros_like(nbytes)
        self.running: list[tuple[int, int, int]] = []
        """(end, rank, worker), a heap."""
        self._now = 0

    def start_of_rank(self, rank: int) -> None:
        """Starts a job of this rank if it and a worker are idle."""
        if self._idle_ranks[rank]:
            able = np.flatnonzero(self._waiting[rank] & self._idle_workers)
            if able.size:
                able = able[self.of_worker[able] == self.of_worker[able].max()]
                ahead = (able - self._last_worker[rank] - 1) % len(self.of_worker)
                self._start(rank, int(able[np.argmin(ahead)]))

    def start_of_worker(self, worker: int) -> None:
        """Starts a job of this worker if it and a rank are idle."""
        if self._idle_workers[worker]:
            able = np.flatnonzero(self._waiting[:, worker] & self._idle_ranks)
            if able.size:
                able = able[self.of_rank[able] == self.of_rank[able].max()]
                behind = (self._last_rank[worker] - able - 1) % len(self.of_rank)
                self._start(int(able[np.argmin(behind)]), worker)

    def end_first(self) -> tuple[int, int]:
        """Ends the job that ends next."""
        self._now, rank, worker = heapq.heappop(self.running)
        self._idle_ranks[rank] = self._idle_workers[worker] = True
        return rank, worker

    def _start(self, rank: int, worker: int) -> None:
        size = int(self._nbytes[rank, worker])
        self.starts[rank, worker] = self._now
        self._last_worker[rank], self._last_rank[worker] = worker, rank
        self.of_rank[rank] -= size
        self.of_worker[worker] -= size
        self._waiting[rank, worker] = self._idle_ranks[rank] = self._idle_workers[worker] = False
        heapq.heappush(self.running, (self._now + size, rank, worker))
