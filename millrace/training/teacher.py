"""A teacher: a fixed model that says how likely it would have sampled each token of stored responses.

    trajectories ─► samples ─► microbatches ─► the trainer's packed forward pass ─► log π_T per response token

As for the policy in training, logits are divided by the temperature that the tokens were sampled at, and the
probabilities are those among the tokens that truncated sampling kept. Ids beyond the tokenizer's, with which many
models pad their vocabulary, have no share of π_T.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy


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
        """A token id of the sample, or of those that it was drawn from, that the teacher lacks; None without one."""
        ids = np.concatenate([sample.prompt_tokens, sample.response_tokens, sample.kept_tokens])
        largest = int(ids.max())
        return largest if largest >= self.num_ids else None

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """[samples] of [R] log π_T of each response token, nats. No sample has an `unknown_id`."""
        if not samples:
            return []
        ends = np.cumsum([len(sample.response_tokens) for sample in samples])
        logprobs_N = torch.zeros(int(ends[-1]), device=self._device)
        for batch in microbatches(samples, self._max_tokens, hidden_size=self._hidden_size):
            logprobs_N[batch.in_batch_N.to(self._device)] = self._policy(batch.to(self._device))[0].float()
        return np.split(logprobs_N.cpu().numpy(), ends[:-1])
