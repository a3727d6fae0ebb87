"""An engine that decodes as fast as a cost model says, in the time of a virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.sleeping.engines import EngineOnNoDevice
from benchmarks.virtual_time.clock import VirtualClock
from benchmarks.virtual_time.run import TimedEngine
from millrace.generation.engines.base import unstarted
from millrace.planning.simulation.costs import Costs
from millrace.types import FinishReason, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights

VOCAB_SIZE = 4
_ROUNDING = 1e-9
"""Tokens: what floating point may leave of a response that is at its end."""


@dataclass(eq=False)
class _Decoding:
    request: Request
    tokens: int
    """Of its whole response."""
    t_started: float
    spans: list[tuple[int, int]]
    sampled: float = 0.0

    @property
    def whole(self) -> int:
        """Tokens sampled; the last one is there only at its end."""
        return min(self.tokens - 1, int(self.sampled + _ROUNDING))


class ScriptedEngine(EngineOnNoDevice, TimedEngine):
    """Every response has as many tokens as `length_of(group, member)` says.

    All requests in flight are decoded at once, each at the rate of `costs.decode`. While the engine loads weights or
    computes prompts, it decodes nothing. Like an engine in a process of its own, it goes on while the stage does other
    work.
    """

    def __init__(self, clock: VirtualClock, costs: Costs, length_of: Callable[[int, int], int]) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, eos_token_id=0)
        self._clock = clock
        self._costs = costs
        self._length_of = length_of
        self._decoding: list[_Decoding] = []
        self._ended: list[Trajectory] = []
        # The requests are known as of this time. It is later than now while the engine computes prompts.
        self._at = 0.0
        self._submitted = False

    @property
    def in_flight(self) -> int:
        return len(self._decoding) + len(self._ended)

    @property
    def tokens_in_flight(self) -> int:
        self._advance()
        return sum(one.whole for one in self._decoding) + sum(len(one.response.tokens) for one in self._ended)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._advance()
        self._submitted = True
        assert not any(request.response_tokens for request in requests)
        # Requests of one group that start together have one prompt.
        prompts = {request.group_id: len(request.prompt_tokens) for request in requests}
        self._at = max(self._at, self._clock.now) + self._costs.prefill(sum(prompts.values()))
        for request in requests:
            tokens = min(self._length_of(request.group_id, request.sample_index), sampling.max_new_tokens)
            self._decoding.append(_Decoding(request, tokens, self._clock.now, [(self.policy_version, 0)]))

    def collect(self, seconds: float) -> list[Trajectory]:
        """As in `Engine`, but it waits for a change as long as it takes: looking again earlier finds nothing.

        After a submission it does not wait, so that the stage can show what is in flight now.
        """
        self._advance()
        submitted, self._submitted = self._submitted, False
        if not self._ended and not submitted:
            self._clock.poll(self._next_end())
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def abort(self) -> None:
        self._decoding, self._ended = [], []

    def interrupt(self) -> list[Trajectory]:
        self._advance()
        stopped = [self._part_of(one, one.whole, "unfinished") for one in self._decoding] + self._ended
        self.abort()
        return stopped

    def update_weights(self, weights: Weights) -> float:
        self._advance()
        pause = self._costs.pause + (self._costs.prefill(self._cached()) if self._decoding else 0.0)
        super().update_weights(weights)
        for one in self._decoding:
            if one.spans[-1][1] == one.whole:
                # The version before sampled nothing.
                one.spans.pop()
            one.spans.append((self.policy_version, one.whole))
        self.stand_still(pause)
        return pause

    def stand_still(self, seconds: float) -> None:
        self._advance()
        self._clock.sleep(seconds)
        self._at += seconds

    def _advance(self) -> None:
        """Brings the requests up to now."""
        while self._at < self._clock.now:
            if not self._decoding:
                self._at = self._clock.now
                return
            each = self._seconds_per_token()
            tokens = min(self._left(), (self._clock.now - self._at) / each)
            self._at = min(self._clock.now, self._at + tokens * each)
            for one in self._decoding:
                one.sampled += tokens
            done = [one for one in self._decoding if one.tokens - one.sampled < _ROUNDING]
            self._decoding = [one for one in self._decoding if one not in done]
            self._ended += [self._part_of(one, one.tokens, "stop") for one in done]

    def _next_end(self) -> float:
        if not self._decoding:
            return float("inf")
        return max(self._at, self._clock.now) + self._left() * self._seconds_per_token()

    def _left(self) -> float:
        """Tokens that the first to end lacks."""
        return min(one.tokens - one.sampled for one in self._decoding)

    def _seconds_per_token(self) -> float:
        return self._costs.decode(len(self._decoding), self._cached())

    def _cached(self) -> int:
        """Tokens in the key-value cache."""
        return round(sum(len(one.request.prompt_tokens) + one.sampled for one in self._decoding))

    def _part_of(self, one: _Decoding, tokens: int, reason: FinishReason) -> Trajectory:
        if tokens == 0:
            return unstarted(one.request)
        response = Response(
            tokens=(0,) * tokens,
            rollout_logprobs=(0.0,) * tokens,
            version_spans=tuple(span for span in one.spans if span[1] < tokens),
            finish_reason=reason,
        )
        return Trajectory(request=one.request, response=response, t_started=one.t_started, t_finished=self._at)
