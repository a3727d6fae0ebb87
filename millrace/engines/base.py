"""What every generation engine offers: tokens in, tokens with the behaviour policy's log-probabilities out.

submit ─► requests in flight ─► collect          many at a time; who asks never waits for the slowest
                ▲
update_weights ─┘ between two tokens, or between two batches: `Response.version_spans` says which

A request may bring a response that is to go on: its tokens are read like the prompt's, and what comes back is what was
drawn behind them. So `environments/episodes.py` makes rollouts of several turns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from millrace.errors import WeightsMismatch
from millrace.types import Prompt, Request, Response, Sampled, Sampling
from millrace.weights.base import Weights
from millrace.weights.fingerprint import names_of

_WAIT_SECONDS = 1.0


class Engine(ABC):
    """A policy that generates, and whose weights can be replaced while it does."""

    policy_version: int
    """Version of the weights now loaded; 0 is the base model."""
    vocab_size: int
    """How many token ids the policy knows: 0 to vocab_size − 1."""

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Puts requests in flight; a response that goes on has what its tokens so far leave of `max_new_tokens`.

        Log-probabilities are those of the distribution that was sampled from, that is after temperature and top-p;
        under greedy decoding (temperature 0) they are those of the unscaled policy.
        """

    @abstractmethod
    def collect(self, seconds: float) -> list[Sampled]:
        """What was finished since the last call, in any order; waits up to `seconds` for the first of it."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted and not collected yet."""

    @abstractmethod
    def abort(self) -> None:
        """Forgets every request in flight."""

    @abstractmethod
    def update_weights(self, weights: Weights) -> float:
        """Replaces the weights, by name; returns the seconds during which nothing was generated for it.

        Requests in flight go on under the new weights. Raises WeightsMismatch naming the tensors that are missing,
        unknown or of another shape; the old weights then stay.
        """

    @abstractmethod
    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest tokens to follow `tokens`, nats, at temperature 1, under the present weights.

        Asked in the way in which trajectories are sampled, caches included: it shows what they would have been given.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Gives the device's memory back: weights go to the CPU's, caches are dropped. Nothing may be in flight.

        Until `wake` it can be aborted and closed, and nothing else.
        """

    @abstractmethod
    def wake(self) -> None:
        """Puts the weights back, bit for bit what they were."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine's processes, if it has any."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, asked: Sequence[Prompt] | None = None
    ) -> list[Response]:
        """One response a prompt, in order, when nothing else is in flight.

        `prompts` are token ids, and `asked` what they stand for, where there is an environment that wants to know. The
        same weights, prompts, sampling and seed give the same responses on the same machine and thread count.
        """
        known = [None] * len(prompts) if asked is None else asked
        requests = [
            Request(group_id=i, sample_index=0, prompt_tokens=tuple(tokens), seed=seed + i, prompt=prompt)
            for i, (tokens, prompt) in enumerate(zip(prompts, known, strict=True))
        ]
        self.submit(requests, sampling)
        responses: dict[int, Response] = {}
        while self.in_flight:
            responses |= {done.request.group_id: done.response for done in self.collect(_WAIT_SECONDS)}
        return [responses[i] for i in range(len(prompts))]


def check_names(expected: Mapping[str, torch.Size], weights: Weights) -> None:
    """Raises WeightsMismatch, naming the tensors, unless these weights are exactly the parameters expected."""
    found = {name: tensor.shape for name, tensor in weights.tensors.items()}
    wrong = {
        "missing": expected.keys() - found.keys(),
        "unknown": found.keys() - expected.keys(),
        "of another shape": {name for name in expected.keys() & found.keys() if expected[name] != found[name]},
    }
    if any(wrong.values()):
        said = "; ".join(f"{kind}: {names_of(sorted(names))}" for kind, names in wrong.items() if names)
        raise WeightsMismatch(f"weights of version {weights.id.policy_version} do not fit the model: {said}")
