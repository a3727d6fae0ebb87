"""An engine that sleeps instead of computing, for campaigns whose pace is known."""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.sleeping.pace import AGREED_LOGPROBS, SleepingPace
from millrace.generation.engines.base import Engine, unstarted
from millrace.types import FinishReason, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights, WeightsId

_FILLER = 0
"""Token id of every token but a response's last."""


@dataclass(slots=True)
class _Running:
    """A request in a slot."""

    request: Request
    tokens_left: int
    """Tokens to sample from `t_started` on."""
    finish_reason: FinishReason
    t_started: float
    spans: list[tuple[int, int]] = field(default_factory=list)


class SleepingEngine(Engine):
    """Each response takes a slot for as long as its own length says; others wait in line for one.

    It has no policy: weights are a version number. Like an engine in a separate process, it continues while the
    stage does other work.
    """

    def __init__(
        self,
        pace: SleepingPace,
        *,
        vocab_size: int,
        eos_token_id: int,
        updated: Callable[[WeightsId, float], None] = lambda *_: None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`updated` is called after each update of weights, with the seconds that slots were in use so far, summed."""
        self.policy_version = 0
        self.vocab_size = vocab_size
        self._eos = eos_token_id
        self._pace = pace
        self._updated = updated
        self._clock, self._sleep = clock, sleep
        self._waiting: deque[tuple[Request, Sampling]] = deque()
        # (end, order of starting, request), the next to end first.
        self._running: list[tuple[float, int, _Running]] = []
        self._starts = itertools.count()
        self._ended: list[Trajectory] = []
        # Of the requests that have left their slots.
        self._slot_seconds = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._ended)

    @property
    def tokens_in_flight(self) -> int:
        now = self._advance()
        ended = sum(len(trajectory.response.tokens) for trajectory in self._ended)
        return ended + sum(self._sampled(running, now) for _, _, running in self._running)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        now = self._advance()
        self._waiting += ((request, sampling) for request in requests)
        self._fill(now)

    def collect(self, seconds: float) -> list[Trajectory]:
        deadline = self._clock() + seconds
        now = self._advance()
        while not self._ended and now < deadline:
            next_end = self._running[0][0] if self._running else deadline
            self._sleep(max(0.0, min(next_end, deadline) - now))
            now = self._advance()
        ended, self._ended = self._ended, []
        return ended

    def interrupt(self) -> list[Trajectory]:
        now = self._advance()
        stopped = [self._stop(running, now) for _, _, running in self._running]
        stopped += [*self._ended, *(unstarted(request) for request, _ in self._waiting)]
        self._running, self._ended = [], []
        self._waiting.clear()
        return stopped

    def update_weights(self, weights: Weights) -> float:
        now = self._advance()
        self.policy_version = weights.id.policy_version
        for _, _, running in self._running:
            first = self._sampled(running, now)
            if running.spans[-1][1] == first:
                # The previous version sampled nothing.
                running.spans.pop()
            running.spans.append((self.policy_version, first))
        in_use = sum(now - running.t_started for _, _, running in self._running)
        self._updated(weights.id, self._slot_seconds + in_use)
        return 0.0

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)

    def sleep(self) -> None:
        """Does nothing: the engine is on no device."""

    def wake(self) -> None:
        """Does nothing: the engine is on no device."""

    def close(self) -> None:
        """Does nothing: the engine has no process."""

    def _advance(self) -> float:
        """Ends the responses that are due, and returns the present time."""
        now = self._clock()
        while self._running and self._running[0][0] <= now:
            t_end, _, running = heapq.heappop(self._running)
            self._ended.append(self._leave(running, t_end, running.tokens_left, running.finish_reason))
            self._fill(t_end)
        return now

    def _fill(self, now: float) -> None:
        """Gives the free slots to the requests that are first in line."""
        while self._waiting and len(self._running) < self._pace.slots:
            request, sampling = self._waiting.popleft()
            length = self._pace.num_tokens(request.group_id, request.sample_index)
            left = max(1, min(length, sampling.max_new_tokens) - len(request.response_tokens))
            reason: FinishReason = "stop" if length <= sampling.max_new_tokens else "length"
            running = _Running(request, left, reason, now, [(self.policy_version, 0)])
            heapq.heappush(self._running, (now + left * self._pace.seconds_per_token, next(self._starts), running))

    def _sampled(self, running: _Running, now: float) -> int:
        """Counts the tokens of an unfinished response; the last one is there only at its end."""
        return min(running.tokens_left - 1, int((now - running.t_started) / self._pace.seconds_per_token))

    def _stop(self, running: _Running, now: float) -> Trajectory:
        """Takes a request out of its slot before its end."""
        sampled = self._sampled(running, now)
        if sampled == 0:
            self._slot_seconds += now - running.t_started
            return unstarted(running.request)
        return self._leave(running, now, sampled, "unfinished")

    def _leave(self, running: _Running, now: float, tokens: int, reason: FinishReason) -> Trajectory:
        self._slot_seconds += now - running.t_started
        last = self._eos if reason == "stop" else _FILLER
        response = Response(
            tokens=(_FILLER,) * (tokens - 1) + (last,),
            rollout_logprobs=(0.0,) * tokens,
            version_spans=tuple(span for span in running.spans if span[1] < tokens),
            finish_reason=reason,
        )
        return Trajectory(request=running.request, response=response, t_started=running.t_started, t_finished=now)
