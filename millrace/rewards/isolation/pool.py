"""A pool of worker processes, in which no response holds up another.

    tasks ─► waiting ─► worker 1 ─┬─ a score                                     ─► the next task
                        worker 2  ├─ slow while others wait: killed              ─► waiting, behind all others
                           …      ├─ over its time, memory or threads: killed    ─► `timeout`, `error`
                                  └─ ended without a score                       ─► `error`

A worker is sent a few tasks ahead, so that neither side waits for the other. When a worker ends, only the task that it
was scoring is affected: the others go to the next worker.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.isolation.fork_server import RewardForkServer, RewardWorker
from millrace.rewards.isolation.sandbox import Limits, hide
from millrace.rewards.isolation.worker import Task, read_score, task_line

_LONGEST_TASK = 16 * 2**20
"""Bytes of a response with its prompt. No verifier gets through more in time."""
_CHECK_SECONDS = 0.001
"""Time between two checks of the workers' limits."""
_AHEAD = 16
"""Maximum number of unanswered tasks per worker."""
_TASKS_PER_WORKER = 1000
"""A worker is replaced after this many tasks, so that caches in libraries can't grow for weeks."""
_MOST_THREADS = 64
"""Threads that a response may start. More would take the host's processors from everyone else."""
_SLOW = 12.0
"""A task is slow once it has cost this many times the mean (see `RewardWorker.cost`),"""
_SLOW_SECONDS = 0.001
"""and at least this much."""
_MORE_PATIENCE = 10.0
"""Each time that a slow task is put behind the others, it may cost this many times as much the next time."""


class Pool:
    """Scores with isolated rewards; every worker has all of them. A context manager; `versions` is set on entering.

    Entering raises InputError if a reward can't be loaded, and hides this process from its workers for good
    (`sandbox.hide`).
    """

    def __init__(self, rewards: Sequence[Reward], limits: Limits) -> None:
        self._options = {reward.name: reward.options for reward in rewards}
        self._limits = limits
        self._tasks_per_worker = 1 if any(reward.fresh for reward in rewards) else _TASKS_PER_WORKER
        self._workers: list[RewardWorker] = []
        self._num_scored, self._total_cost = 0, 0.0
        self.versions: Mapping[str, str] = {}
        """Version of each reward by its name."""

    def __enter__(self) -> Self:
        hide()
        self._server = RewardForkServer(self._options, self._limits)
        self.versions = self._server.versions
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.socket.close()
        self._workers.clear()
        self._server.close()

    def score(self, tasks: Sequence[Task], each: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Score]]:
        """Yield (index of the task, its score) as soon as a task is done.

        `each` is called many times per second meanwhile. If the iterator is closed early, unfinished tasks are lost.
        Raises ForkServerLost if the fork server has ended.
        """
        waiting: deque[int] = deque()
        lines: dict[int, bytes] = {}
        for number, task in enumerate(tasks):
            line = task_line(task)
            if len(line) > _LONGEST_TASK:
                yield number, failed(f"{len(task.response):,} characters to score; at most {_LONGEST_TASK:,} bytes are")
            else:
                lines[number] = line
                waiting.append(number)
        slow: Counter[int] = Counter()
        checked = time.monotonic()
        try:
            while waiting or any(worker.tasks for worker in self._workers):
                self._assign(waiting, lines)
                sockets = wait([worker.socket for worker in self._workers], _CHECK_SECONDS)
                for worker in [worker for worker in self._workers if worker.socket in sockets]:
                    yield from self._receive(worker, waiting)
                if not sockets or time.monotonic() - checked >= _CHECK_SECONDS:
                    for worker in list(self._workers):
                        yield from self._enforce_limits(worker, waiting, slow)
                    checked = time.monotonic()
                    each()
        finally:
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._kill(worker)

    def _assign(self, waiting: deque[int], lines: Mapping[int, bytes]) -> None:
        """Send tasks ahead, fewer towards the end, so that every worker keeps having some."""
        ahead = min(_AHEAD, 1 + len(waiting) // (2 * self._limits.workers))
        while waiting:
            ready = [
                worker
                for worker in self._workers
                if len(worker.tasks) < ahead and worker.num_tasks < self._tasks_per_worker
            ]
            if len(self._workers) < self._limits.workers:
                worker = self._server.take()
                self._workers.append(worker)
            elif ready:
                worker = min(ready, key=lambda worker: len(worker.tasks))
            else:
                break
            number = waiting.popleft()
            worker.send(number, lines[number])
        for worker in self._workers:
            worker.flush()

    def _receive(self, worker: RewardWorker, waiting: deque[int]) -> Iterator[tuple[int, Score]]:
        lines, cost, expected = worker.receive(), worker.cost(), len(worker.tasks)
        if lines:
            self._num_scored += len(lines)
            self._total_cost += cost
            worker.begin()
        for line in (lines or [])[:expected]:
            yield worker.tasks.popleft(), read_score(line)
        # A response that has taken its worker over may send more than the worker was asked for.
        if lines is None or len(lines) > expected:
            yield from self._reap(worker, waiting)
        elif worker.num_tasks >= self._tasks_per_worker and not worker.tasks:
            self._kill(worker)

    def _enforce_limits(
        self, worker: RewardWorker, waiting: deque[int], slow: Counter[int]
    ) -> Iterator[tuple[int, Score]]:
        """Kill a worker whose current task has used more than a response may."""
        if not worker.tasks:
            return
        seconds, number, limits = worker.seconds(), worker.tasks[0], self._limits
        score: Score | None = None
        if seconds > limits.timeout_seconds:
            score = failed(f"no verdict after {limits.timeout_seconds:g} s", "timeout")
        elif worker.memory_mb() > limits.memory_mb:
            score = failed(f"scoring it took more than {limits.memory_mb} MiB of memory")
        elif worker.num_threads() > _MOST_THREADS:
            score = failed(f"scoring it took more than {_MOST_THREADS} threads")
        elif not (waiting or len(worker.tasks) > 1) or not self._is_slow(worker, slow[number]):
            return
        worker.tasks.popleft()
        waiting.extendleft(reversed(worker.tasks))
        self._kill(worker)
        if score is None:
            slow[number] += 1
            waiting.append(number)
        else:
            yield number, replace(score, seconds=seconds)

    def _is_slow(self, worker: RewardWorker, times: int) -> bool:
        """`times`: how often the current task was slow before."""
        mean = self._total_cost / self._num_scored if self._num_scored else 0.0
        is_slow = worker.cost() > max(_SLOW_SECONDS, _SLOW * mean) * _MORE_PATIENCE**times
        # A worker that has sent something may be at another task by now.
        return is_slow and not wait([worker.socket], 0)

    def _reap(self, worker: RewardWorker, waiting: deque[int]) -> Iterator[tuple[int, Score]]:
        """Remove a worker that has ended: its current task is an error, the others wait again."""
        self._workers.remove(worker)
        code = self._server.reap(worker)
        if worker.tasks:
            number = worker.tasks.popleft()
            waiting.extendleft(reversed(worker.tasks))
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            yield number, replace(failed(f"the process that scored it ended ({how})"), seconds=worker.seconds())

    def _kill(self, worker: RewardWorker) -> None:
        self._workers.remove(worker)
        self._server.reap(worker)
