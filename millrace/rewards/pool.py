"""Judges that can be killed, and no response that holds up another one.

    tasks ─► waiting ─► judge 1 ─┬─ a verdict                               ─► the next one
                        judge 2  ├─ slow while others wait: killed          ─► waiting, behind all others
                           …     ├─ past its deadline, or over its memory   ─► killed: `timeout`, `error`
             spare: the next one └─ ended by itself                         ─► `error`

A judge is sent a few tasks ahead, so that neither side waits for the other to wake up. Whatever ends a judge concerns
the first of them alone: the others are sent to the next judge.
"""

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.nursery import Judge, Nursery
from millrace.rewards.sandbox import Limits
from millrace.rewards.wire import LONGEST_VERDICT, Judged, Task, read_verdict, task_line

_LONGEST_TASK = 16 * 2**20
"""Bytes of a response with its prompt; no verifier gets through more in time."""
_LOOK_SECONDS = 0.002
_AHEAD = 16
"""Tasks that a judge is sent at most before it has answered the first of them."""
_LIFE = 1000
"""Tasks after which a judge is replaced: what a library remembers of each must not grow for weeks."""
_SLOW = 10.0
"""A task is slow once it has used so many times the mean of those before it, of processor time,"""
_PATIENCE_SECONDS = 0.003
"""and at least so much;"""
_STILLNESS = 20.0
"""or once it has taken so many times that by the clock: it sleeps."""
_MORE_PATIENCE = 10.0
"""Each time it is put behind the others it is given so many times as long: what is lost stays a small part."""


class Pool:
    """Judges with isolated rewards, all loaded in every judge. A context manager; entered, it has their versions.

    Entering raises InputError with one sentence where a reward can't be loaded.
    """

    def __init__(self, rewards: Sequence[Reward], limits: Limits) -> None:
        self._recipes: Mapping[str, Mapping[str, Any]] = {reward.name: reward.options for reward in rewards}
        self._limits = limits
        self._life = 1 if any(reward.fresh for reward in rewards) else _LIFE
        self._nursery: Nursery | None = None
        self._judges: list[Judge] = []
        self._selector = selectors.DefaultSelector()
        self._judged, self._judged_seconds = 0, 0.0
        self.versions: Mapping[str, str] = {}
        """Of each reward, by its name."""

    def __enter__(self) -> Self:
        self._nursery = Nursery(self._recipes, self._limits)
        self.versions = self._nursery.versions
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for judge in self._judges:
            judge.socket.close()
        self._selector.close()
        if self._nursery is not None:
            self._nursery.close()

    def judge(self, tasks: Sequence[Task], each: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Judged]]:
        """Yields the number of each task with what was said of its response, in the order in which they are judged.

        `each` is called many times a second meanwhile. What the judges still have when the iterator is left early is
        lost with them.
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
            yield from self._judge(waiting, lines, each)
        finally:
            for judge in [judge for judge in self._judges if judge.tasks]:
                self._forget(judge)
                self._nursery_there().kill(judge)

    def _judge(
        self, waiting: deque[int], lines: Mapping[int, bytes], each: Callable[[], None]
    ) -> Iterator[tuple[int, Judged]]:
        slow: Counter[int] = Counter()
        looked = time.monotonic()
        while waiting or any(judge.tasks for judge in self._judges):
            self._give_out(waiting, lines, slow)
            for judge in self._ready():
                yield from self._hear(judge, waiting)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                for judge in list(self._judges):
                    yield from self._look_at(judge, waiting, slow)
                looked = time.monotonic()
                each()

    def _give_out(self, waiting: deque[int], lines: Mapping[int, bytes], slow: Counter[int]) -> None:
        """So many tasks ahead that all judges have some to the end; one that was slow has a judge to itself."""
        ahead = min(_AHEAD, self._life, 1 + len(waiting) // (2 * self._limits.workers))
        while waiting:
            number = waiting[0]
            room = 1 if slow[number] else ahead
            ready = [judge for judge in self._judges if self._takes_one(judge, room, slow)]
            if len(self._judges) < self._limits.workers:
                judge = self._new()
            elif ready:
                judge = min(ready, key=lambda judge: len(judge.tasks))
            else:
                break
            waiting.popleft()
            judge.give(number, lines[number], time.monotonic())
        # Made while the others work, to be there when one of them is lost.
        self._nursery_there().order()

    def _takes_one(self, judge: Judge, room: int, slow: Counter[int]) -> bool:
        if len(judge.tasks) >= room or judge.given >= self._life or judge.sending:
            return False
        return not (judge.tasks and slow[judge.tasks[-1]])

    def _new(self) -> Judge:
        judge = self._nursery_there().take()
        self._judges.append(judge)
        self._selector.register(judge.socket, selectors.EVENT_READ, judge)
        return judge

    def _ready(self) -> list[Judge]:
        """The judges that have said something within a moment."""
        for judge in self._judges:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if judge.sending else 0)
            if self._selector.get_key(judge.socket).events != events:
                self._selector.modify(judge.socket, events, judge)
        found = self._selector.select(_LOOK_SECONDS)
        for key, events in found:
            if events & selectors.EVENT_WRITE:
                key.data.flush()
        return [key.data for key, events in found if events & selectors.EVENT_READ]

    def _hear(self, judge: Judge, waiting: deque[int]) -> Iterator[tuple[int, Judged]]:
        lines = judge.receive(LONGEST_VERDICT)
        for line in lines or ():
            if not judge.tasks:
                # A judge that says more than it was asked has been taken over by a response.
                lines = None
                break
            now = time.monotonic()
            self._judged += 1
            self._judged_seconds += now - judge.since
            judge.since = now
            yield judge.tasks.popleft(), read_verdict(line)
        if lines is None:
            yield from self._lose(judge, waiting)
        elif judge.given >= self._life and not judge.tasks:
            self._forget(judge)
            self._nursery_there().kill(judge)

    def _look_at(self, judge: Judge, waiting: deque[int], slow: Counter[int]) -> Iterator[tuple[int, Judged]]:
        """Kills a judge that has spent what a response may take."""
        if not judge.tasks:
            return
        seconds, first, limits = time.monotonic() - judge.since, judge.tasks[0], self._limits
        verdict: Score | None = None
        if seconds > limits.timeout_seconds:
            verdict = failed(f"no verdict after {limits.timeout_seconds:g} s", "timeout")
        elif judge.memory_mb() > limits.memory_mb:
            verdict = failed(f"judging it took more than {limits.memory_mb} MiB of memory")
        elif not (waiting or len(judge.tasks) > 1) or not self._is_slow(judge, seconds, slow[first]):
            return
        judge.tasks.popleft()
        waiting.extendleft(reversed(judge.tasks))
        self._forget(judge)
        self._nursery_there().kill(judge)
        if verdict is None:
            slow[first] += 1
            waiting.append(first)
        else:
            yield first, Judged(score=verdict, seconds=seconds)

    def _is_slow(self, judge: Judge, seconds: float, times: int) -> bool:
        mean = self._judged_seconds / self._judged if self._judged else 0.0
        patience = max(_PATIENCE_SECONDS, _SLOW * mean) * _MORE_PATIENCE**times
        return judge.busy_seconds() > patience or seconds > _STILLNESS * patience

    def _lose(self, judge: Judge, waiting: deque[int]) -> Iterator[tuple[int, Judged]]:
        """What a judge that has ended by itself leaves behind."""
        seconds, tasks = time.monotonic() - judge.since, list(judge.tasks)
        self._forget(judge)
        code = self._nursery_there().bury(judge)
        if tasks:
            waiting.extendleft(reversed(tasks[1:]))
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            yield tasks[0], Judged(score=failed(f"the process that judged it ended ({how})"), seconds=seconds)

    def _forget(self, judge: Judge) -> None:
        self._judges.remove(judge)
        self._selector.unregister(judge.socket)

    def _nursery_there(self) -> Nursery:
        assert self._nursery is not None, "the pool is entered"
        return self._nursery


def _too_long(task: Task, length: int) -> Judged:
    reason = f"{len(task.response):,} characters are {length:,} bytes to judge; at most {_LONGEST_TASK:,} are"
    return Judged(score=failed(reason), seconds=0.0)
