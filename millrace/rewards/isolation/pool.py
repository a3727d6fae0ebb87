"""A pool of workers that can be killed; no response holds up another.

    tasks ─► waiting ─► worker 1 ─┬─ a score                                ─► the next task
                        worker 2  ├─ slow while others wait: killed         ─► waiting, behind all others
                           …      ├─ past its deadline, too much memory,
                                  │  too many threads                       ─► killed: `timeout`, `error`
            spares: the next ones └─ ended by itself                        ─► `error`

A worker is sent a few tasks ahead, so that neither side waits for the other to wake up. When a worker ends, only the
task in front is affected: the others go to the next worker.
"""

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.isolation.fork_server import RewardForkServer, RewardWorker
from millrace.rewards.isolation.messages import LONGEST_SCORE, Task, read_score, task_line
from millrace.rewards.isolation.sandbox import Limits, hide

_LONGEST_TASK = 16 * 2**20
"""Bytes of a response with its prompt. No verifier gets through more in time."""
_LOOK_SECONDS = 0.002
_STALL_SECONDS = 0.001
"""With no answer for so long, the workers are looked at. The least that the kernel's epoll can wait."""
_AHEAD = 16
"""Most unanswered tasks per worker."""
_TASKS_PER_WORKER = 1000
"""A worker is replaced after so many tasks, so that caches in libraries cannot grow for weeks."""
_SPARES = 4
"""Workers forked ahead while nothing waits to be scored. While something does, one is forked once none is left."""
_THREADS = 64
"""Most threads that a worker may start. Many would take the host's processors from everyone else."""
_SLOW = 12.0
"""A task is slow once it has used this many times the mean processor time of those before it,"""
_PATIENCE_SECONDS = 0.0008
"""and at least this much,"""
_STILLNESS = 20.0
"""or once it has taken this many times that by the clock,"""
_STILL_SECONDS = 0.06
"""and at least this much: it sleeps. On a busy machine a worker may have to wait for a processor for so long."""
_MORE_PATIENCE = 10.0
"""Each time a slow task is put behind the others, it gets this many times as long next time."""


class Pool:
    """Scores with isolated rewards; every worker has all of them. A context manager; `versions` is set on entering.

    Entering raises InputError with one sentence if a reward can't be loaded, and hides this process from its workers
    for good (`sandbox.hide`).
    """

    def __init__(self, rewards: Sequence[Reward], limits: Limits) -> None:
        self._recipes = {reward.name: reward.options for reward in rewards}
        self._limits = limits
        self._tasks_per_worker = 1 if any(reward.fresh for reward in rewards) else _TASKS_PER_WORKER
        self._server: RewardForkServer | None = None
        self._workers: list[RewardWorker] = []
        self._selector = selectors.DefaultSelector()
        self._scored, self._busy_seconds = 0, 0.0
        self.versions: Mapping[str, str] = {}
        """By the name of each reward."""

    def __enter__(self) -> Self:
        hide()
        self._server = RewardForkServer(self._recipes, self._limits)
        self.versions = self._server.versions
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.socket.close()
        self._selector.close()
        if self._server is not None:
            self._server.close()

    def score(self, tasks: Sequence[Task], each: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Score]]:
        """Yield (number of the task, its score), in the order in which they are done.

        `each` is called many times per second meanwhile. If the iterator is closed early, the workers' unfinished tasks
        are lost.
        """
        waiting: deque[int] = deque()
        lines: dict[int, bytes] = {}
        for number, task in enumerate(tasks):
            line = task_line(task)
            if len(line) > _LONGEST_TASK:
                yield number, _too_long(task, len(line))
            else:
                lines[number] = line
                waiting.append(number)
        try:
            yield from self._score(waiting, lines, each)
        finally:
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._kill(worker)

    def _score(
        self, waiting: deque[int], lines: Mapping[int, bytes], each: Callable[[], None]
    ) -> Iterator[tuple[int, Score]]:
        slow: Counter[int] = Counter()
        looked = time.monotonic()
        while waiting or any(worker.tasks for worker in self._workers):
            self._give_out(waiting, lines, slow)
            readable = self._readable()
            for worker in readable:
                yield from self._receive(worker, waiting, slow)
            if not readable or time.monotonic() - looked >= _LOOK_SECONDS:
                for worker in list(self._workers):
                    yield from self._enforce_limits(worker, waiting, slow)
                looked = time.monotonic()
                each()

    def _give_out(self, waiting: deque[int], lines: Mapping[int, bytes], slow: Counter[int]) -> None:
        """Send tasks ahead, so few that every worker has some to the end. A task that was slow gets its own worker."""
        ahead = min(_AHEAD, self._tasks_per_worker, 1 + len(waiting) // (2 * self._limits.workers))
        while waiting:
            number = waiting[0]
            room = 1 if slow[number] else ahead
            if len(self._workers) < self._limits.workers:
                worker = self._new()
            elif ready := [worker for worker in self._workers if self._takes_one(worker, room, slow)]:
                worker = min(ready, key=lambda worker: len(worker.tasks))
            else:
                break
            waiting.popleft()
            worker.give(number, lines[number], time.monotonic())
        # Forking takes processor time from the workers that are scoring.
        self._entered().prefork(1 if waiting or self._entered().late else _SPARES)

    def _takes_one(self, worker: RewardWorker, room: int, slow: Counter[int]) -> bool:
        if len(worker.tasks) >= room or worker.given >= self._tasks_per_worker or worker.sending:
            return False
        return not (worker.tasks and slow[worker.tasks[-1]])

    def _new(self) -> RewardWorker:
        worker = self._entered().take()
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def _readable(self) -> list[RewardWorker]:
        """The workers that have sent something, or do so within `_STALL_SECONDS`."""
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)
        found = self._selector.select(_STALL_SECONDS)
        for key, events in found:
            if events & selectors.EVENT_WRITE:
                key.data.flush()
        return [key.data for key, events in found if events & selectors.EVENT_READ]

    def _receive(self, worker: RewardWorker, waiting: deque[int], slow: Counter[int]) -> Iterator[tuple[int, Score]]:
        lines = worker.receive(LONGEST_SCORE)
        if lines and worker.tasks:
            busy = worker.lap_seconds()
            # A hostile response may well end in a score. Its seconds would have the next one waited for longer.
            if not slow[worker.tasks[0]]:
                self._scored += len(lines)
                self._busy_seconds += busy
        for line in lines or ():
            if not worker.tasks:
                # A worker that sends more than it was asked for has been taken over by a response.
                lines = None
                break
            worker.since = time.monotonic()
            yield worker.tasks.popleft(), read_score(line)
        if lines is None:
            yield from self._reap(worker, waiting)
        elif worker.given >= self._tasks_per_worker and not worker.tasks:
            self._kill(worker)

    def _enforce_limits(
        self, worker: RewardWorker, waiting: deque[int], slow: Counter[int]
    ) -> Iterator[tuple[int, Score]]:
        """Kill a worker whose current task has used what a response may use."""
        if not worker.tasks:
            return
        now = time.monotonic()
        seconds, first, limits = now - worker.since, worker.tasks[0], self._limits
        score: Score | None = None
        if seconds > limits.timeout_seconds:
            score = failed(f"no verdict after {limits.timeout_seconds:g} s", "timeout")
        elif worker.memory_mb() > limits.memory_mb:
            score = failed(f"judging it took more than {limits.memory_mb} MiB of memory")
        elif worker.threads() > _THREADS:
            score = failed(f"judging it took more than {_THREADS} threads")
        elif not (waiting or len(worker.tasks) > 1) or not self._is_slow(worker, now, slow[first]):
            return
        worker.tasks.popleft()
        waiting.extendleft(reversed(worker.tasks))
        self._kill(worker)
        if score is None:
            slow[first] += 1
            waiting.append(first)
        else:
            yield first, replace(score, seconds=seconds)

    def _is_slow(self, worker: RewardWorker, now: float, times: int) -> bool:
        mean = self._busy_seconds / self._scored if self._scored else 0.0
        patience = max(_PATIENCE_SECONDS, _SLOW * mean) * _MORE_PATIENCE**times
        still = now - worker.since > max(_STILL_SECONDS * _MORE_PATIENCE**times, _STILLNESS * patience)
        slow = still or worker.busy_seconds() > patience
        # Where this process was kept from running, the worker may be many tasks further by now.
        return slow and not worker.has_answered()

    def _reap(self, worker: RewardWorker, waiting: deque[int]) -> Iterator[tuple[int, Score]]:
        """A worker has ended by itself: its current task is an error, the others wait again."""
        seconds, tasks = time.monotonic() - worker.since, list(worker.tasks)
        self._forget(worker)
        code = self._entered().reap(worker)
        if tasks:
            waiting.extendleft(reversed(tasks[1:]))
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            yield tasks[0], replace(failed(f"the process that judged it ended ({how})"), seconds=seconds)

    def _kill(self, worker: RewardWorker) -> None:
        self._forget(worker)
        self._entered().kill(worker)

    def _forget(self, worker: RewardWorker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)

    def _entered(self) -> RewardForkServer:
        assert self._server is not None, "the pool is entered"
        return self._server


def _too_long(task: Task, length: int) -> Score:
    reason = f"{len(task.response):,} characters are {length:,} bytes to judge; at most {_LONGEST_TASK:,} are"
    return failed(reason)
