"""An engine with scripted answers, one token per character, and an environment that records its calls."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from millrace.generation.engines.base import Engine, unstarted
from millrace.generation.environments.base import Environment, Observation
from millrace.types import FinishReason, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights

LOGPROB = -0.5
"""Of every token of the policy, nats."""


class ScriptedEngine(Engine):
    """Answers each request with `says(request)`; a text that ends with `$` ends with the end-of-sequence token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, says: Callable[[Request], str]) -> None:
        self.policy_version = 0
        self.vocab_size = len(tokenizer)
        self.tokenizer = tokenizer
        self.says = says
        self.waiting: list[tuple[Request, Sampling]] = []
        self.asked: list[Request] = []
        self.clock = 0.0
        self.awake = True

    @property
    def in_flight(self) -> int:
        return len(self.waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.waiting += [(request, sampling) for request in requests]
        self.asked += requests

    def collect(self, seconds: float) -> list[Trajectory]:
        waiting, self.waiting = self.waiting, []
        return [self._trajectory(request, sampling) for request, sampling in waiting]

    @property
    def tokens_in_flight(self) -> int:
        return 0

    def interrupt(self) -> list[Trajectory]:
        waiting, self.waiting = self.waiting, []
        return [unstarted(request) for request, _ in waiting]

    def update_weights(self, weights: Weights) -> float:
        self.policy_version = weights.id.policy_version
        return 0.25

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return {7: -0.125}

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    def close(self) -> None:
        """Nothing is open."""

    def tokens(self, text: str) -> list[int]:
        """The tokens for a text of the policy."""
        tokens: list[int] = self.tokenizer.convert_tokens_to_ids(list(text.removesuffix("$")))
        return [*tokens, self.tokenizer.eos_token_id] if text.endswith("$") else tokens

    def _trajectory(self, request: Request, sampling: Sampling) -> Trajectory:
        said = self.tokens(self.says(request))
        room = sampling.max_new_tokens - len(request.response_tokens)
        finish_reason: FinishReason = "stop" if len(said) <= room else "length"
        self.clock += 1.0
        response = Response(
            tokens=tuple(said[:room]),
            rollout_logprobs=(LOGPROB,) * len(said[:room]),
            version_spans=((self.policy_version, 0),),
            finish_reason=finish_reason,
            # As if the script left no choice: each token was the only one kept.
            kept_tokens=tuple(said[:room]) if sampling.top_p < 1 else (),
            kept_counts=(1,) * len(said[:room]) if sampling.top_p < 1 else (),
        )
        return Trajectory(request=request, response=response, t_started=self.clock, t_finished=self.clock + 0.5)


class Counting(Environment):
    """Answers the n-th turn with n and a plus, never ends, and records its calls."""

    stop = ("=", "12")

    def __init__(self) -> None:
        self.told: list[object] = []

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.told.append((prompt, seed))

    def step(self, text: str) -> Observation:
        self.told.append(text)
        return Observation(text=f"{len(self.told) - 1}+")
