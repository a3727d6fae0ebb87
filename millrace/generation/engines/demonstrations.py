"""The engine of supervised fine-tuning: it answers each prompt with the response that its source demonstrates.

    submit ─► demonstration of the prompt ─► tokens, log μ = 0 ─► collect         no model is loaded

A demonstration is what a policy of a single possible response would sample: log μ is 0 at each token. It carries the
version of the weights that the engine has heard of, so that streams, staleness and rollbacks work as with any engine.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from millrace.chat.encoder import PromptEncoder
from millrace.errors import PromptsError
from millrace.generation.engines.base import Engine
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Weights


class Demonstrations(Engine):
    """Demonstrations of the requests' prompts, as tokens of the model in `folder`. `encoders` are by source."""

    has_policy = False

    def __init__(self, folder: Path, encoders: Mapping[str, PromptEncoder]) -> None:
        self.policy_version = 0
        self.vocab_size: int = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        self._encoders = encoders
        self._ready: list[Trajectory] = []

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raises PromptsError for a demonstration that is longer than `max_new_tokens`."""
        for request in requests:
            assert request.prompt is not None
            response = self._encoders[request.source].demonstrate(request.prompt)
            check_length(request.prompt.prompt_id, len(response.tokens), sampling.max_new_tokens)
            response = replace(response, version_spans=((self.policy_version, 0),))
            now = time.time()
            self._ready.append(Trajectory(request=request, response=response, t_started=now, t_finished=now))

    def collect(self, seconds: float) -> list[Trajectory]:
        return self.interrupt()

    @property
    def in_flight(self) -> int:
        return len(self._ready)

    @property
    def tokens_in_flight(self) -> int:
        """Always 0: nothing is lost with this process."""
        return 0

    def interrupt(self) -> list[Trajectory]:
        ready, self._ready = self._ready, []
        return ready

    def update_weights(self, weights: Weights) -> float:
        self.policy_version = weights.id.policy_version
        return 0.0

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return {}

    def sleep(self) -> None:
        """Does nothing: it uses no device."""

    def wake(self) -> None:
        """Does nothing: it uses no device."""

    def close(self) -> None:
        """Does nothing: it runs in the caller's process."""


def check_length(prompt_id: str, num_tokens: int, max_new_tokens: int) -> None:
    """Raises PromptsError if a demonstration of so many tokens is too long."""
    if num_tokens > max_new_tokens:
        read = f"its demonstration has {num_tokens} tokens and generation.max_new_tokens is {max_new_tokens}"
        raise PromptsError(read, file=f"prompt {prompt_id}", expected=f"at least {num_tokens} there")
