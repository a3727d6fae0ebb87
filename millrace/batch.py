"""From trajectories of any lengths to the padded tensors of one optimizer step.

    samples ──sort by length──► runs of similar length ──pad right──► microbatches of at most N tokens each

Shapes: B sequences, T tokens of the longest prompt + response in the microbatch, less one (position t predicts t + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory as the trainer sees it."""

    prompt_tokens: npt.NDArray[np.int32]
    """[P] token ids."""
    response_tokens: npt.NDArray[np.int32]
    """[R] token ids, the end-of-sequence token included."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[R] log μ of the behaviour policy, after temperature and top-p, nats."""
    loss_mask: npt.NDArray[np.uint8]
    """[R] 1 where a token carries loss."""
    temperature: float
    """Of the behaviour policy: the trainer's logits are divided by it too, for π and μ to be of one kind."""
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Right-padded tensors of some samples; index [b, t] speaks of the token at position t + 1."""

    input_ids_BS: torch.Tensor
    """[B, T + 1] int64, the whole sequences."""
    attention_mask_BS: torch.Tensor
    """[B, T + 1] int64, 1 on real tokens."""
    loss_mask_BT: torch.Tensor
    """[B, T] float32, 1 on response tokens that carry loss."""
    rollout_logprobs_BT: torch.Tensor
    """[B, T] float32, 0 where there is no loss."""
    advantages_BT: torch.Tensor
    """[B, T] float32, the response's advantage."""
    temperatures_B11: torch.Tensor
    """[B, 1, 1] float32."""
    places: tuple[int, ...]
    """[B] which of the batch's samples these are."""
    response_spans: tuple[tuple[int, int], ...]
    """[B] first t of the response's tokens, and the one behind the last."""


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[Microbatch]:
    """Splits a batch into microbatches of at most `max_tokens` padded tokens, or of one sample where that is longer.

    The split depends on the samples alone, so the same batch gives the same floating-point sums.
    """
    by_length = sorted(range(len(samples)), key=lambda place: samples[place].num_tokens)
    runs: list[list[int]] = []
    for place in by_length:
        # Sorted: the newest sample is the longest, so it alone sets the padded width.
        if runs and (len(runs[-1]) + 1) * samples[place].num_tokens <= max_tokens:
            runs[-1].append(place)
        else:
            runs.append([place])
    return [_pad([samples[place] for place in run], tuple(run)) for run in runs]


def _pad(samples: Sequence[Sample], places: tuple[int, ...]) -> Microbatch:
    shape = (len(samples), max(sample.num_tokens for sample in samples))
    input_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.float32)
    rollout_logprobs = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt_tokens), sample.num_tokens
        input_ids[row, :start] = sample.prompt_tokens
        input_ids[row, start:end] = sample.response_tokens
        attention_mask[row, :end] = 1
        loss_mask[row, start:end] = sample.loss_mask
        rollout_logprobs[row, start:end] = sample.rollout_logprobs
    advantages = np.array([sample.advantage for sample in samples], dtype=np.float32)
    temperatures = np.array([sample.temperature for sample in samples], dtype=np.float32)
    return Microbatch(
        input_ids_BS=torch.from_numpy(input_ids),
        attention_mask_BS=torch.from_numpy(attention_mask),
        loss_mask_BT=torch.from_numpy(loss_mask[:, 1:]),
        rollout_logprobs_BT=torch.from_numpy(rollout_logprobs[:, 1:]),
        advantages_BT=torch.from_numpy(advantages)[:, None].expand(-1, shape[1] - 1),
        temperatures_B11=torch.from_numpy(temperatures)[:, None, None],
        places=places,
        response_spans=tuple((len(sample.prompt_tokens) - 1, sample.num_tokens - 1) for sample in samples),
    )
