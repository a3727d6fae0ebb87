"""The interface of generation engines: tokens in, tokens with the behaviour policy's log-probabilities out.

submit ─► requests in flight ─► collect          many at a time, in any order
                ▲
update_weights ─┘ between two tokens or two batches; `Response.version_spans` records which version drew what

A request may hold a response to continue. Its tokens are read like the prompt's, and the engine returns only the new
ones. `environments/episodes.py` makes trajectories of several turns this way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from configs.stored import DEFAULT_SOURCE
from millrace.errors import WeightsMismatch
from millrace.types import NO_RESPONSE, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights
from millrace.weights.fingerprint import names_of

_WAIT_SECONDS = 1.0


class Engine(ABC):
    """A policy that generates, and whose weights can be replaced meanwhile."""

    policy_version: int
    """Version of the loaded weights; 0 is the base model."""
    vocab_size: int
    """The policy's token ids are 0 to vocab_size − 1."""

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Puts requests in flight. A request's `response_tokens` count towards `max_new_tokens`.

        Log-probabilities are those of the distribution that tokens are drawn from; of the policy at temperature 0.
        """

    @abstractmethod
    def collect(self, seconds: float) -> list[Trajectory]:
        """The trajectories finished since the last call, in any order. Waits up to `seconds` for the first one."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted and not collected yet."""

    @property
    @abstractmethod
    def tokens_in_flight(self) -> int:
        """Response tokens sampled so far for the requests in flight, without those they were submitted with."""

    def abort(self) -> None:
        """Drops every request in flight."""
        self.interrupt()

    @abstractmethod
    def interrupt(self) -> list[Trajectory]:
        """Ends every request in flight and returns each with the tokens sampled so far, perhaps none, in any order.

        A response that is not at its end is `unfinished`. Ended responses that were not collected are returned too.
        """

    @property
    def accepts_weights(self) -> bool:
        """Whether `update_weights` may be called; if not, it may once more requests have ended."""
        return True

    @abstractmethod
    def update_weights(self, weights: Weights) -> float:
        """Replaces the weights by name, or the adapter; returns the seconds that generation was paused.

        Requests in flight continue under the new weights; `generation.keep_cache` decides whether they keep their
        key-value caches. With vLLM they finish under the adapter that they began with. Requests submitted later are
        computed under the new weights alone. Raises WeightsMismatch naming the tensors that are missing, unknown or of
        another shape; the old weights then stay.
        """

    @abstractmethod
    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest tokens to follow `tokens`, nats, at temperature 1, computed as in sampling.

        Empty for an engine without a model.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Frees the device's memory: weights move to the CPU, caches are dropped. Nothing may be in flight.

        Until `wake`, only `abort` and `close` are allowed.
        """

    @abstractmethod
    def wake(self) -> None:
        """Moves the weights back, bit for bit."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine's processes, if it has any."""

    def generate(
        self,
        texts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        prompts: Sequence[Prompt] | None = None,
        each_wait: Callable[[], None] = lambda: None,
        source: str = DEFAULT_SOURCE,
    ) -> list[Response]:
        """One response per text, which is token ids, in order, while nothing else is in flight.

        The texts are of one `source`. An environment needs their `prompts`. `each_wait` is called about once per
        second; if it raises, the requests stay in flight.
        """
        prompt_of_text: Sequence[Prompt | None] = prompts or [None] * len(texts)
        requests = [
            Request(
                group_id=i, sample_index=0, prompt_tokens=tuple(tokens), seed=seed + i, source=source, prompt=prompt
            )
            for i, (tokens, prompt) in enumerate(zip(texts, prompt_of_text, strict=True))
        ]
        self.submit(requests, sampling)
        responses: dict[int, Response] = {}
        while self.in_flight:
            each_wait()
            responses |= {done.request.group_id: done.response for done in self.collect(_WAIT_SECONDS)}
        return [responses[i] for i in range(len(texts))]


def unstarted(request: Request) -> Trajectory:
    """Returns the trajectory of an interrupted request without a sampled token."""
    return Trajectory(request=request, response=NO_RESPONSE, t_started=0.0, t_finished=0.0)


def check_names(parameters: Mapping[str, torch.Size], weights: Weights) -> None:
    """Raises WeightsMismatch, naming the tensors, unless the weights are exactly these parameters.

    Of an adapter: unless they are exactly an A and a B for each of the parameters that it adapts.
    """
    adapter = weights.manifest.adapter
    expected = parameters if adapter is None else adapter.shapes(parameters)
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    wrong = {
        "missing": expected.keys() - shapes.keys(),
        "unknown": shapes.keys() - expected.keys(),
        "of another shape": {name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]},
    }
    if any(wrong.values()):
        reasons = "; ".join(f"{kind}: {names_of(sorted(names))}" for kind, names in wrong.items() if names)
        raise WeightsMismatch(f"weights of version {weights.id.policy_version} do not fit the model: {reasons}")
