"""log π of a response by transformers' own forward pass of that sequence alone."""

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.training.batch import Sample


def response_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[R, V] log π at the response's positions, at its temperature, with gradient; `model` has its own attention.

    Where sampling was truncated, over the tokens that it kept; minus infinity for the others.
    """
    tokens = torch.tensor([*sample.prompt_tokens, *sample.response_tokens])
    logits_RV = model(input_ids=tokens[None]).logits[0, len(sample.prompt_tokens) - 1 : -1]
    keep_RV = torch.ones_like(logits_RV, dtype=torch.bool)
    for keep_V, ids in zip(keep_RV, np.split(sample.kept_tokens, np.cumsum(sample.kept_counts)), strict=False):
        if len(ids):
            keep_V[:] = False
            keep_V[torch.from_numpy(ids).long()] = True
    return torch.log_softmax((logits_RV / sample.temperature).masked_fill(~keep_RV, -torch.inf), dim=-1)


def taken(logprobs_RV: torch.Tensor, sample: Sample) -> torch.Tensor:
    """[R] log π of the response's own tokens."""
    return logprobs_RV.gather(1, torch.from_numpy(sample.response_tokens).long()[:, None]).squeeze(1)
