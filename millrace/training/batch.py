"""The trainer's input, a batch of samples, and a policy's input, a packed microbatch.

    one microbatch    p p p │ r │ r │ p p r r       S positions, segments end to end; the first prompt stands once for
    cu_seqlens        0       3   4   5       9     three responses of 2, 2 and 1 tokens (prefix_tree.py)
    predicts          2 3 2 4 2 6 7 8               position whose hidden state predicts each response token

The last token of a sample has no position, because no token is predicted from it.

Shapes: S positions, Q segments, T keys that segments see, N response tokens of the microbatch, including those not
trained; L of them trainable.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from configs.stored import DEFAULT_SOURCE
from millrace.training.logprobs import KeptTokens
from millrace.training.losses.forward_kl import TopTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A trajectory, its advantage by rewards, and its teacher's log-probabilities."""

    prompt_tokens: npt.NDArray[np.int32]
    """[P] token ids, at least one."""
    response_tokens: npt.NDArray[np.int32]
    """[R] token ids, the end-of-sequence token included."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[R] log μ of the behaviour policy, after temperature and top-p, nats."""
    loss_mask: npt.NDArray[np.uint8]
    """[R] 1 where a token is trained."""
    temperature: float
    """Temperature of the behaviour policy; the trainer divides its logits by it too."""
    advantage: float
    staleness: int
    """Policy versions by which the trainer is ahead of the oldest one that sampled a token, of those not masked."""
    max_new_tokens: int
    """Maximum length of the response, tokens."""
    group: int = 0
    """Index of its group in the batch."""
    source: str = DEFAULT_SOURCE
    """Name of the source in the config that its group belongs to."""
    is_demonstration: bool = False
    """Whether no policy sampled the response, so that its log μ are 0 and mean nothing."""
    kept_tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[K] token ids that truncated sampling could draw from, token by token; empty if nothing was truncated."""
    kept_counts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] how many of them belong to each token, 0 if it was not truncated; empty if no token was."""
    teacher_logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[R] log π_T of the teacher, as `rollout_logprobs` of μ, nats; empty without a teacher."""
    teacher_top_tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R, k] flat: the teacher's k likeliest tokens at each token; empty without `training.distillation.top_k`."""
    teacher_top_logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[R, k] flat: log π_T of each of them, nats."""
    routed_experts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    """[P + R - 1, layers, experts per token] flat: the experts that computed each token but the last in the generator;
    empty if they were not recorded."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Samples packed in segments; position `predicts_N[n]` predicts response token n.

    A segment is a sample without its last token, or tokens that several samples begin with, or the rest of one of
    these.
    """

    input_ids_S: torch.Tensor
    """[S] int64, tokens of prompts and responses."""
    positions_S: torch.Tensor
    """[S] int64, index of the token in its sample."""
    cu_seqlens_Q1: torch.Tensor
    """[Q + 1] int32, start of each segment, then S."""
    lengths: tuple[int, ...]
    """[Q] lengths of the segments; unlike `cu_seqlens_Q1` readable without waiting for a device."""
    keys_T: torch.Tensor | None
    """[T] int64 into S: positions that each segment attends to, segment after segment, its own last; None if each
    attends only to itself."""
    cu_keys_Q1: torch.Tensor
    """[Q + 1] int32, start of each segment in `keys_T`, then T; `cu_seqlens_Q1` if each attends only to itself."""
    key_lengths: tuple[int, ...]
    """[Q] how many tokens the last one of each segment sees, ascending."""
    where_W: torch.Tensor
    """[W] int64 into S: each token of each sample but its last, sample after sample; empty in a spare rank's dummy
    batch."""
    sample_lengths: tuple[int, ...]
    """Their number in each sample, W in all."""
    predicts_N: torch.Tensor
    """[N] int64 into S: the position before the token."""
    targets_N: torch.Tensor
    """[N] int64, the tokens."""
    trainable_L: torch.Tensor
    """[L] int64, ascending: the trainable response tokens. A mask would make a device wait to count them."""
    rollout_logprobs_N: torch.Tensor
    """[N] float32, log μ, nats."""
    advantages_N: torch.Tensor
    """[N] float32, of the token's response."""
    teacher_logprobs_N: torch.Tensor
    """[N] float32, log π_T, nats; 0 without a teacher."""
    teacher_top: TopTokens | None
    """The teacher's likeliest tokens at each response token; None if the samples have none."""
    temperatures_N: torch.Tensor
    """[N] float32, of the token's response."""
    staleness_N: torch.Tensor
    """[N] int64, of the token's response."""
    response_N: torch.Tensor
    """[N] int64, ascending: index of the token's response in this microbatch."""
    in_batch_N: torch.Tensor
    """[N] int64: index of the token among all response tokens of the batch, in the order of its samples."""
    kept: KeptTokens | None
    """The token ids that truncated sampling could draw at each response token; None if nothing was truncated."""
    routed_experts_SX: torch.Tensor | None
    """[S, layers · experts per token] int64, the generator's experts, `NOT_RECORDED` where there are none; None if no
    sample has any."""
    indices: tuple[int, ...]
    """[Q] indices of the samples in the batch; empty in a spare rank's dummy batch."""

    def to(self, device: torch.device) -> Self:
        """A copy with the tensors on `device`."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        movable = (torch.Tensor, KeptTokens, TopTokens)
        moved: Any = {name: value.to(device) for name, value in columns.items() if isinstance(value, movable)}
        return replace(self, **moved)
