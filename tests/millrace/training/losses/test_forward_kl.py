"""The forward KL on a teacher's likeliest tokens against autograd of KL(π_T‖π) over the whole vocabulary."""

from typing import Any

import numpy as np
import pytest
import torch

from millrace.training.logprobs import KeptTokens, LogitScale, chunked_logprobs, chunked_top
from millrace.training.losses.forward_kl import TopTokens

N, H, V = 6, 5, 11
KEPT = [[], [3], [0, 4, 9], [], [*range(V)], [1, 2]]
"""The tokens that truncated sampling could draw; all where the list is empty."""
TARGETS = torch.tensor([2, 3, 9, 0, 10, 1])
TEMPERATURES = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7, 1.3])
PULL, PUSH, SCALE = (torch.linspace(*ends, N, dtype=torch.float64) for ends in ((-1, 2), (1, -3), (0.5, 3)))
"""Weights of log π, the entropy and the KL in a loss."""


def leaves(seed: int) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias of a policy or a teacher."""
    random = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(*s, generator=random, dtype=torch.float64).requires_grad_() for s in ((N, H), (V, H), (V,))
    )


def kept_tokens() -> KeptTokens:
    sizes_N = np.array([len(ids) for ids in KEPT])
    return KeptTokens(torch.tensor([t for ids in KEPT for t in ids]), torch.from_numpy(sizes_N), sizes_N)


def all_logprobs(of: tuple[torch.Tensor, ...], scale: LogitScale, truncated: bool) -> torch.Tensor:
    """[N, V] log π from the whole matrix."""
    hidden, weight, bias = of
    logits_NV = (hidden @ weight.t() + bias) / scale.divisor
    if scale.cap is not None:
        logits_NV = scale.cap * torch.tanh(logits_NV / scale.cap)
    logits_NV = logits_NV / TEMPERATURES[:, None]
    if truncated:
        dropped_NV = torch.tensor([[bool(ids) and v not in ids for v in range(V)] for ids in KEPT])
        logits_NV = logits_NV.masked_fill(dropped_NV, -1e9)
    return torch.log_softmax(logits_NV, dim=-1)


def teacher_top(k: int, truncated: bool = False) -> TopTokens:
    """As it is stored: in float32."""
    kept = kept_tokens() if truncated else None
    _, (tokens, logprobs) = chunked_top(*leaves(1), TARGETS, TEMPERATURES, k, kept=kept, chunk=4)
    return TopTokens(tokens, logprobs.clamp(min=torch.finfo(torch.float32).min).float())


def exact(k: int, top: TopTokens, logprobs_NV: torch.Tensor) -> torch.Tensor:
    """[N] the KL between the shares of the k tokens and of the others as one; over the vocabulary where there are none.

    The teacher's rest is that of its rounded shares.
    """
    shares_NK = top.logprobs_NK.double().exp()
    kl_N = (shares_NK * (shares_NK.clamp(min=1e-300).log() - logprobs_NV.gather(1, top.tokens_NK))).sum(dim=1)
    if k == V:
        return kl_N
    others_NV = torch.ones(N, V, dtype=torch.bool).scatter(1, top.tokens_NK, False)
    rest_N = (1 - shares_NK.sum(dim=1)).clamp(min=0)
    log_rest_N = logprobs_NV.masked_fill(~others_NV, -1e9).logsumexp(dim=1)
    has_rest_N = log_rest_N > -1e8
    return kl_N + torch.where(has_rest_N, torch.xlogy(rest_N, rest_N) - rest_N * log_rest_N, 0)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("scale", [LogitScale(), LogitScale(divisor=0.5, cap=2.0)], ids=str)
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("k", [1, 3, V])
def test_value_and_gradient_are_exact(k: int, truncated: bool, scale: LogitScale, chunk: int) -> None:
    policy, top = leaves(0), teacher_top(k, truncated)
    logprobs_NV = all_logprobs(policy, scale, truncated)
    expected_N = exact(k, top, logprobs_NV)
    options: dict[str, Any] = {"scale": scale, "kept": kept_tokens() if truncated else None, "chunk": chunk}
    logprobs_N, entropy_N, kl_N = chunked_logprobs(*policy, TARGETS, TEMPERATURES, teacher_top=top, **options)
    assert kl_N is not None
    torch.testing.assert_close(kl_N, expected_N, rtol=0, atol=1e-10)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=1)
    chosen_N = logprobs_NV.gather(1, TARGETS[:, None]).squeeze(1)
    for found, expected in (
        (kl_N @ SCALE, expected_N @ SCALE),
        (
            logprobs_N @ PULL + entropy_N @ PUSH + kl_N @ SCALE,
            chosen_N @ PULL + entropies_N @ PUSH + expected_N @ SCALE,
        ),
    ):
        gradients = zip(*(torch.autograd.grad(v, policy, retain_graph=True) for v in (found, expected)), strict=True)
        for grad, expected_grad in gradients:
            torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-10)


def test_with_all_tokens_it_is_the_kl_over_the_vocabulary_and_with_fewer_less() -> None:
    policy, teacher = (all_logprobs(leaves(seed), LogitScale(), False).detach() for seed in (0, 1))
    kls = []
    for k in range(1, V + 1):
        kl_N = chunked_logprobs(*leaves(0), TARGETS, TEMPERATURES, teacher_top=teacher_top(k))[2]
        assert kl_N is not None
        kls.append(kl_N.detach())
    assert torch.all(torch.stack(kls).diff(dim=0) >= -1e-6)
    expected_N = torch.nn.functional.kl_div(policy, teacher, log_target=True, reduction="none").sum(dim=1)
    torch.testing.assert_close(kls[-1], expected_N, rtol=0, atol=1e-6)
    assert torch.all(kls[0] > 0)


def test_a_nearly_certain_policy_is_pulled_to_the_teachers_other_tokens() -> None:
    bias_V = torch.zeros(V)
    bias_V[2] = 30.0
    bias_V.requires_grad_()
    top = TopTokens(torch.tensor([[2]]), torch.tensor([[0.5]]).log())
    arguments = torch.zeros(1, H), torch.zeros(V, H), bias_V, torch.tensor([2]), torch.ones(1)
    kl_N = chunked_logprobs(*arguments, teacher_top=top)[2]
    assert kl_N is not None
    (grad_V,) = torch.autograd.grad(kl_N.sum(), bias_V)
    # Half of the teacher's mass is on the other ten, and as good as none of the policy's.
    expected_V = torch.full((V,), -0.05)
    expected_V[2] = 0.5
    torch.testing.assert_close(grad_V, expected_V, rtol=1e-5, atol=0)
    assert kl_N.item() == pytest.approx(np.log(0.5) + 0.5 * (30 - np.log(10)), rel=1e-6)


def test_padding_of_the_policys_vocabulary_that_the_teacher_lacks_has_no_share() -> None:
    policy, top = leaves(0), teacher_top(V)
    hidden, weight, bias = (values.detach() for values in policy)
    padded = torch.cat([bias, torch.full((3,), -30.0, dtype=torch.float64)])
    wider = hidden, torch.cat([weight, torch.zeros(3, H, dtype=torch.float64)]), padded
    kl_N, expected_N = (chunked_logprobs(*of, TARGETS, TEMPERATURES, teacher_top=top)[2] for of in (wider, policy))
    assert kl_N is not None
    torch.testing.assert_close(kl_N, expected_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("truncated", [False, True])
def test_the_likeliest_tokens_are_those_of_the_whole_matrix(truncated: bool) -> None:
    logprobs_NV = all_logprobs(leaves(1), LogitScale(), truncated).detach()
    kept = kept_tokens() if truncated else None
    logprobs_N, top = chunked_top(*leaves(1), TARGETS, TEMPERATURES, 2, kept=kept, chunk=4)
    torch.testing.assert_close(logprobs_N, logprobs_NV.gather(1, TARGETS[:, None]).squeeze(1), rtol=0, atol=1e-12)
    expected = logprobs_NV.topk(2)
    possible = expected.values > -1e8
    assert torch.equal(top.tokens_NK[possible], expected.indices[possible])
    torch.testing.assert_close(top.logprobs_NK[possible], expected.values[possible], rtol=0, atol=1e-12)
    assert torch.isfinite(top.logprobs_NK).all()
    assert chunked_top(*leaves(1), TARGETS, TEMPERATURES, 0)[1].tokens_NK.shape == (N, 0)


@pytest.mark.slow
@pytest.mark.parametrize("truncated", [False, True])
def test_compiled_chunks_have_the_same_forward_kl_and_gradient(truncated: bool) -> None:
    policy, kept, results = leaves(0), kept_tokens() if truncated else None, []
    for compiled in (False, True):
        logprobs_N, entropy_N, kl_N = chunked_logprobs(
            *policy, TARGETS, TEMPERATURES, kept=kept, teacher_top=teacher_top(3, truncated), chunk=4, compiled=compiled
        )
        assert kl_N is not None
        total = logprobs_N @ PULL + entropy_N @ PUSH + kl_N @ SCALE
        results.append((kl_N, *torch.autograd.grad(total, policy)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
