"""A clock that stands still while anything runs: threads that sleep by it take turns, the earliest to wake first.

    thread A   ██ sleep(3) ·················· █            one thread runs at a time; `now` jumps to the next wake-up
    thread B   ··█ poll ···█ ················ █ …          a poll also ends as soon as another thread reports a change
    now        0            0                 3

Equal wake-ups happen in the order in which the threads were given. So a run depends on what the threads do alone.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

from millrace.runtime import stage
from storage.streams import group_commit


class Stuck(Exception):
    """Every thread waits for a change that another one would have to make."""


class _Over(BaseException):
    """Another thread failed."""


@dataclass(eq=False)
class _Thread:
    name: str
    main: Callable[[], None]
    wake: float = 0.0
    polls: object = None
    """What a change of wakes it earlier; None: it sleeps."""
    ended: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Taken, but for the moment in which the thread begins to run."""

    def __post_init__(self) -> None:
        self.turn.acquire()


class VirtualClock:
    """Seconds since the threads began."""

    def __init__(self) -> None:
        self.now = 0.0
        self._threads: list[_Thread] = []
        self._real: list[threading.Thread] = []
        self._running: _Thread | None = None
        self._error: BaseException | None = None

    def run(self, mains: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Runs these to their ends, each in a thread of its name. Raises the first error of any of them.

        Raises Stuck if all that are left wait for each other.
        """
        for name, main in mains:
            self.spawn(name, main)
        self._pass_on()
        for thread in self._real:
            thread.join()
        if self._error is not None:
            raise self._error

    def spawn(self, name: str, main: Callable[[], None]) -> "_Thread":
        """Another thread, which runs once this one waits."""
        thread = _Thread(name, main, wake=self.now)
        self._threads.append(thread)
        self._real.append(threading.Thread(target=self._live, args=(thread,), name=name))
        self._real[-1].start()
        return thread

    def join(self, thread: "_Thread") -> None:
        """Lets the others run until this one has ended."""
        while not thread.ended:
            self.poll(of=thread)

    def time(self) -> float:
        """In place of `time.time` and `time.monotonic`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Lets the others run until `seconds` have passed."""
        self._wait(self.now + max(0.0, seconds), polls=None)

    def poll(self, until: float = math.inf, of: object = "run") -> None:
        """Lets the others run until one of them reports a change of the same thing, or until this time."""
        self._wait(max(self.now, until), polls=of)

    def changed(self, of: object = "run") -> None:
        """Ends every poll of it, now."""
        for thread in self._threads:
            if thread.polls is of and thread is not self._running:
                thread.wake = min(thread.wake, self.now)

    def _live(self, thread: _Thread) -> None:
        thread.turn.acquire()
        try:
            self._check()
            thread.main()
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 — raised by `run`
            self._error = self._error or error
        thread.ended = True
        self.changed(of=thread)
        self._pass_on()

    def _wait(self, until: float, *, polls: object) -> None:
        self._check()
        thread = self._running
        assert thread is not None
        thread.wake, thread.polls = until, polls
        if self._next() is not thread:
            self._pass_on()
            thread.turn.acquire()
            self._check()
        elif thread.wake == math.inf:
            raise Stuck(self._described())
        else:
            self.now = thread.wake
        thread.polls = None

    def _next(self) -> _Thread | None:
        left = [thread for thread in self._threads if not thread.ended]
        return min(left, key=lambda thread: thread.wake, default=None)

    def _pass_on(self) -> None:
        """Lets the next thread run."""
        self._running = following = self._next()
        if following is None:
            return
        if following.wake == math.inf:
            self._error = self._error or Stuck(self._described())
        elif self._error is None:
            self.now = max(self.now, following.wake)
        following.turn.release()

    def _check(self) -> None:
        if self._error is not None:
            raise _Over

    def _described(self) -> str:
        waiting = ", ".join(thread.name for thread in self._threads if not thread.ended)
        return f"at {self.now:.3f} s all threads wait for each other: {waiting}"


class _Time:
    """What the product uses of the module `time`."""

    def __init__(self, clock: VirtualClock, sleep: Callable[[float], None]) -> None:
        self.time = self.monotonic = self.perf_counter = clock.time
        self.sleep = sleep


class _Condition:
    """In place of `threading.Condition`, where only one thread runs at a time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        """Nobody else runs."""

    def __exit__(self, *_: object) -> None:
        """Nobody else has waited."""

    def wait(self, seconds: float = math.inf) -> None:
        self._clock.poll(self._clock.now + seconds, of=self)

    def notify(self) -> None:
        self._clock.changed(of=self)


class _ClockThread:
    """In place of `threading.Thread`."""

    def __init__(self, clock: VirtualClock, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._clock, self._target, self._name = clock, target, name

    def start(self) -> None:
        self._thread = self._clock.spawn(self._name, self._target)

    def join(self) -> None:
        self._clock.join(self._thread)


@contextmanager
def in_virtual_time(clock: VirtualClock, packages: Sequence[str]) -> Iterator[None]:
    """Inside the block, all modules of these packages that are loaded have the clock's time.

    A stage that waits sleeps only to look again: it looks when something has changed.
    """
    with ExitStack() as stack:
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] in packages]
        for module in [one for one in modules if getattr(one, "time", None) is time]:
            if module is not sys.modules[__name__]:
                stack.enter_context(patch.object(module, "time", _Time(clock, clock.sleep)))
        stack.enter_context(patch.object(stage, "time", _Time(clock, lambda seconds: clock.poll())))
        stack.enter_context(patch.object(group_commit, "monotonic", clock.time))
        stack.enter_context(patch.object(group_commit, "Condition", partial(_Condition, clock)))
        stack.enter_context(patch.object(group_commit, "Thread", partial(_ClockThread, clock)))
        yield
