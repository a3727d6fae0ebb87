"""A teacher: a fixed model that says how likely it would have sampled each token of stored responses.

    trajectories ─► samples ─► microbatches ─► the trainer's packed forward pass ─► log π_T per response token,
                                                                              and of the likeliest tokens there

As for the policy in training, logits are divided by the temperature that the tokens were sampled at, and the
probabilities are those among the tokens that truncated sampling kept. Ids beyond the tokenizer's, with which many
models pad their vocabulary, have no share of π_T.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy

_LOWEST = torch.finfo(torch.float32).min


class TaughtTokens(NamedTuple):
    """A teacher's log-probabilities of the R tokens of a response."""

    logprobs: npt.NDArray[np.float32]
    """[R] log π_T of each, nats."""
    top_tokens: npt.NDArray[np.int32]
    """[R, k] the k likeliest tokens at each, the likeliest first."""
    top_logprobs: npt.NDArray[np.float32]
    """[R, k] log π_T of each of these, nats; the lowest float32 for a token that truncated sampling could not draw."""


class Teacher:
    """Owns `model`, on `device`. `num_ids` is the number of token ids of its tokenizer.

    `max_tokens` is the number of tokens of a forward pass, prompts included. Raises InputError for a model of an
    unsupported family.
    """

    def __init__(self, model: PreTrainedModel, *, num_ids: int, max_tokens: int, device: str = "cpu") -> None:
        self.num_ids = min(num_ids, model.config.vocab_size)
        model.resize_token_embeddings(self.num_ids)
        self._policy = PackedPolicy(model).eval().requires_grad_(False).to(device)
        self._device = torch.device(device)
        self._max_tokens = max_tokens
        self._hidden_size: int = model.config.hidden_size

    def on_progress(self, function: Callable[[], None]) -> None:
        """Has `function` called many times in each pass, as a sign of progress."""
        self._policy.on_progress = function

    def unknown_id(self, sample: Sample) -> int | None:
        """A token id of the sample, kept ones included, that the teacher does not know; None without one."""
        ids = np.concatenate([sample.prompt_tokens, sample.response_tokens, sample.kept_tokens])
        largest = int(ids.max())
        return largest if largest >= self.num_ids else None

    @torch.no_grad()
    def teach(self, samples: Sequence[Sample], top_k: int = 0) -> list[TaughtTokens]:
        """Computes log π_T of the response tokens of each sample, and of the `top_k` likeliest tokens at each of them.

        There are fewer of these if the teacher has fewer tokens. No sample has an `unknown_id`.
        """
        if not samples:
            return []
        ends = np.cumsum([len(sample.response_tokens) for sample in samples])
        num_tokens, num_top = int(ends[-1]), min(top_k, self.num_ids)
        logprobs_N, top_logprobs_NK = torch.zeros(num_tokens), torch.zeros(num_tokens, num_top)
        top_tokens_NK = torch.zeros(num_tokens, num_top, dtype=torch.int32)
        for batch in microbatches(samples, self._max_tokens, hidden_size=self._hidden_size):
            taught_N, top = self._policy.top(batch.to(self._device), num_top)
            logprobs_N[batch.in_batch_N] = taught_N.float().cpu()
            top_tokens_NK[batch.in_batch_N] = top.tokens_NK.int().cpu()
            # The lowest float64 would become infinite.
            top_logprobs_NK[batch.in_batch_N] = top.logprobs_NK.clamp(min=_LOWEST).float().cpu()
        columns = (logprobs_N, top_tokens_NK, top_logprobs_NK)
        split = [np.split(values.numpy(), ends[:-1]) for values in columns]
        return [TaughtTokens(*values) for values in zip(*split, strict=True)]
