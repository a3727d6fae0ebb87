"""Which tokens vLLM could draw from where top-p or top-k leave some out: the trainer renormalises π over the same.

    on a GPU   return_sampling_mask ──────────────────────► the mask of each token
    on a CPU   log-probabilities of the whole vocabulary ─► those that are not minus infinity

vLLM returns masks from its newer model runner alone, which needs a GPU. The other runner tells the log-probabilities
of the distribution it drew from: tokens that were not kept have minus infinity. `leave_out_the_impossible` keeps these
out of what it sends, which would otherwise be the whole vocabulary for each token.
"""

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.outputs import LogprobsTensors


def leave_out_the_impossible() -> None:
    """Makes vLLM's sampler leave out what it could not draw, if it is asked for the whole vocabulary's logprobs.

    Called in vLLM's own processes, any number of times. Rows of a batch stay equally long: as long as the one with the
    most tokens left.
    """
    from vllm.v1.sample.sampler import Sampler

    gather = Sampler.gather_logprobs
    if getattr(gather, "leaves_out", False):
        return

    def gather_possible(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> "LogprobsTensors":
        if num_logprobs == logprobs.shape[-1]:
            num_logprobs = int(logprobs.isfinite().sum(dim=-1).max())
        return gather(logprobs, num_logprobs, token_ids)

    gather_possible.leaves_out = True  # type: ignore[attr-defined]
    Sampler.gather_logprobs = staticmethod(gather_possible)


def kept_tokens(completion: "CompletionOutput") -> list[list[int]]:
    """[R] of the token ids that each token was drawn from; the request asked for masks or for all logprobs."""
    if completion.sampling_mask is not None:
        masks: list[list[int]] = completion.sampling_mask.token_ids
        return masks
    assert completion.logprobs is not None
    return [
        [token for token, entry in of_token.items() if entry.logprob > -math.inf] for of_token in completion.logprobs
    ]
