"""An engine whose responses have given lengths, with a meter of its tokens and its time.

         ┌─ submit, collect: generating ─┐
caller ──┼─ update_weights ──────────────┼─► engine             between two calls: `outside`
         └─ next_logprobs: the probe ────┘
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil

from benchmarks.sleeping.pace import AGREED_LOGPROBS, SleepingPace
from millrace.generation.engines.base import Engine
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Weights

_RECORD_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class MeterReading:
    """Sums of tokens, updates and seconds up to one moment."""

    t: float
    """Unix seconds."""
    tokens: float
    updates: float
    """Updates of the weights."""
    response_seconds: float
    """From a response's submission to its last token, summed over those collected."""
    update_seconds: float
    probe_seconds: float
    """In `next_logprobs`."""
    outside_seconds: float
    """Between two calls: the caller commits, admits and looks for weights."""
    cpu_seconds: float
    """Of this process and the engine's processes."""


class MeteredEngine(Engine):
    """Ends each response of `engine` at the length that `pace` sets for it, if it does not end sooner."""

    def __init__(self, engine: Engine, pace: SleepingPace, record: Callable[[MeterReading], None]) -> None:
        """`record` gets a reading a few times per second."""
        self.policy_version = engine.policy_version
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._pace = pace
        self._record = record
        self._recorded = 0.0
        self._collected = 0
        self._updates = 0
        self._response_seconds = 0.0
        self._seconds = dict.fromkeys(("generate", "update", "probe", "outside"), 0.0)
        # When the last call ended.
        self._since = time.monotonic()

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    @property
    def tokens_in_flight(self) -> int:
        return self._engine.tokens_in_flight

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        with self._counted("generate"):
            for request in requests:
                length = self._pace.num_tokens(request.group_id, request.sample_index)
                limit = min(length, sampling.max_new_tokens)
                self._engine.submit([request], replace(sampling, max_new_tokens=limit))

    def collect(self, seconds: float) -> list[Trajectory]:
        with self._counted("generate"):
            trajectories = self._engine.collect(seconds)
            self._collected += sum(len(trajectory.response.tokens) for trajectory in trajectories)
            self._response_seconds += sum(trajectory.t_finished - trajectory.t_started for trajectory in trajectories)
        if self._since - self._recorded >= _RECORD_SECONDS:
            self._recorded = self._since
            self._record(self._reading())
        return trajectories

    def interrupt(self) -> list[Trajectory]:
        return self._engine.interrupt()

    def update_weights(self, weights: Weights) -> float:
        with self._counted("update"):
            pause_seconds = self._engine.update_weights(weights)
        self.policy_version = self._engine.policy_version
        self._updates += 1
        return pause_seconds

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        with self._counted("probe"):
            self._engine.next_logprobs(tokens, most)
        # The sleeping trainer computes none.
        return dict(AGREED_LOGPROBS)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        self._count("outside")
        try:
            yield
        finally:
            self._count(what)

    def _count(self, what: str) -> None:
        now = time.monotonic()
        self._seconds[what] += now - self._since
        self._since = now

    def _reading(self) -> MeterReading:
        return MeterReading(
            t=time.time(),
            tokens=self._collected + self._engine.tokens_in_flight,
            updates=self._updates,
            response_seconds=self._response_seconds,
            update_seconds=self._seconds["update"],
            probe_seconds=self._seconds["probe"],
            outside_seconds=self._seconds["outside"],
            cpu_seconds=cpu_seconds(),
        )


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its children."""
    this_process = psutil.Process()
    times = [process.cpu_times() for process in (this_process, *this_process.children(recursive=True))]
    return sum(cpu.user + cpu.system for cpu in times)
