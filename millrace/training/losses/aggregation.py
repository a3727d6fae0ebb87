"""How the tokens' losses become one number: Σ scale · loss over all tokens of the batch.

token_mean      1 / Σ L               every token counts the same                       (DAPO, arXiv 2503.14476, §3.3)
sequence_mean   1 / (Q⁺ · L_q)        every response counts the same, however long      (GRPO, arXiv 2402.03300, §4.1.1)
prompt_mean     1 / (G⁺ · Σ_g L)      every prompt counts the same, and in it every token (ScaleRL, arXiv 2510.13786)
constant        1 / (Q · T)           no length has an influence                        (Dr. GRPO, arXiv 2503.20783, §3)

L_q: tokens of response q that carry loss; Q: responses of the batch; Q⁺: those with such a token; Σ_g L: such tokens in
the group of responses to a prompt; G⁺: groups with one; T: the maximum length of a response. The scale follows from the
lengths alone, before any forward pass. So each microbatch and each rank sums its own tokens' scaled losses, and the
total is the same however the batch is split.
"""

import torch

from millrace.errors import InputError


def token_scale(aggregation: str, lengths_Q: torch.Tensor, max_new_tokens: int, groups_Q: torch.Tensor) -> torch.Tensor:
    """The factor of each token's loss, per response.

    Per response of the whole batch, `lengths_Q` is [Q] int64, the number of tokens that carry loss, and `groups_Q` [Q]
    int64, the number of its group, from 0. Returns [Q] float64, 0 for a response without such a token. Raises
    InputError if no response has one, and for an unknown aggregation.
    """
    lengths_Q = lengths_Q.double()
    has_tokens_Q = lengths_Q > 0
    if not bool(has_tokens_Q.any()):
        raise InputError(
            f"none of the batch's {len(lengths_Q)} responses has a token that carries loss; expected at least one"
        )
    if aggregation == "token_mean":
        scale_Q = (1 / lengths_Q.sum()).expand_as(lengths_Q)
    elif aggregation == "sequence_mean":
        scale_Q = 1 / (has_tokens_Q.sum() * lengths_Q)
    elif aggregation == "prompt_mean":
        tokens_G = torch.zeros(int(groups_Q.max()) + 1, dtype=torch.float64).index_add_(0, groups_Q, lengths_Q)
        scale_Q = 1 / ((tokens_G > 0).sum() * tokens_G[groups_Q])
    elif aggregation == "constant":
        scale_Q = torch.full_like(lengths_Q, 1 / (len(lengths_Q) * max_new_tokens))
    else:
        raise InputError(
            f'there is no aggregation "{aggregation}"; expected one of token_mean, sequence_mean, prompt_mean, constant'
        )
    return scale_Q.where(has_tokens_Q, 0)
