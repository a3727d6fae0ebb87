"""Chunked log-probabilities: the same numbers and gradients as the whole matrix gives, and never the whole matrix."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.training.logprobs import KeptTokens, LogitScale, chunked_logprobs

N, H, V = 7, 5, 11


def inputs(dtype: torch.dtype, *, bias: bool = False) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias or an empty tensor, targets, temperatures."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    targets_N = torch.randint(V, (N,), generator=random)
    temperatures_N = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7, 1.3, 1.0])
    return draw(N, H), draw(V, H), draw(V if bias else 0), targets_N, temperatures_N


def naive(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    sets: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy from the whole matrix; each token is drawn from its set in `sets`, unless that is empty."""
    logits_NV = hidden_NH @ weight_VH.t() + (bias_V if len(bias_V) else 0)
    keep_NV = torch.ones_like(logits_NV, dtype=torch.bool)
    for n, ids in enumerate(sets):
        if ids:
            keep_NV[n] = torch.isin(torch.arange(V), torch.tensor(ids))
    logits_NV = (logits_NV / temperatures_N[:, None]).masked_fill(~keep_NV, -torch.inf)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    entropy_N = torch.special.entr(logprobs_NV.exp()).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def kept_tokens(sets: Sequence[Sequence[int]]) -> KeptTokens:
    flat = [token for ids in sets for token in ids]
    sizes_N = np.array([len(ids) for ids in sets])
    return KeptTokens(torch.tensor(flat, dtype=torch.int64), torch.from_numpy(sizes_N), sizes_N)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, N, 100])
def test_values_and_gradients_are_those_of_the_whole_matrix(chunk: int, bias: bool) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.float64, bias=bias)
    pull_N = torch.linspace(-1, 2, N, dtype=torch.float64)
    expected, expected_entropy = naive(hidden, weight, offset, targets, temperatures)
    leaves = (hidden, weight, offset) if bias else (hidden, weight)
    expected_grads = torch.autograd.grad((expected * pull_N).sum(), leaves)
    logprobs, entropy, _ = chunked_logprobs(
        hidden, weight, offset if bias else None, targets, temperatures, chunk=chunk
    )
    grads = torch.autograd.grad((logprobs * pull_N).sum(), leaves)
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "scale", [LogitScale(divisor=3.0), LogitScale(cap=1.5), LogitScale(divisor=0.5, cap=2.0)], ids=str
)
def test_scaled_and_capped_logits_have_their_exact_values_and_gradients(scale: LogitScale) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.float64, bias=True)
    logits_NV = (hidden @ weight.t() + offset) / scale.divisor
    if scale.cap is not None:
        logits_NV = scale.cap * torch.tanh(logits_NV / scale.cap)
    expected = torch.distributions.Categorical(logits=logits_NV / temperatures[:, None])
    leaves = (hidden, weight, offset)
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, offset, targets, temperatures, scale=scale, chunk=2)
    torch.testing.assert_close(logprobs, expected.log_prob(targets), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected.entropy(), rtol=1e-12, atol=1e-12)
    expected_grads = torch.autograd.grad(expected.log_prob(targets).sum(), leaves)
    for grad, expected_grad in zip(torch.autograd.grad(logprobs.sum(), leaves), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@given(
    scale=st.sampled_from([LogitScale(), LogitScale(divisor=3.0), LogitScale(divisor=0.5, cap=2.0)]),
    chunk=st.sampled_from([1, 3, N, 100]),
    truncated=st.booleans(),
    alone=st.booleans(),
)
def test_the_entropy_has_its_exact_gradient_beside_that_of_the_target_and_alone(
    scale: LogitScale, chunk: int, truncated: bool, alone: bool
) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.float64, bias=True)
    sets = [[n, 10] if truncated and n % 2 else [] for n in targets.tolist()]
    sets = [sorted(set(ids)) for ids in sets]
    raw_NV = (hidden @ weight.t() + offset) / scale.divisor
    logits_NV = (raw_NV if scale.cap is None else scale.cap * torch.tanh(raw_NV / scale.cap)) / temperatures[:, None]
    keep_NV = torch.tensor([[not ids or v in ids for v in range(V)] for ids in sets])
    logprobs_NV = torch.log_softmax(logits_NV.masked_fill(~keep_NV, -1e9), dim=-1)
    pull_N, push_N = torch.linspace(-1, 2, N, dtype=torch.float64), torch.linspace(1, -3, N, dtype=torch.float64)
    chosen_N = logprobs_NV.gather(1, targets[:, None]).squeeze(1) * (0 if alone else 1)
    expected = (chosen_N * pull_N).sum() - ((logprobs_NV.exp() * logprobs_NV).sum(dim=-1) * push_N).sum()
    found_N, entropy_N, _ = chunked_logprobs(
        hidden, weight, offset, targets, temperatures, scale=scale, kept=kept_tokens(sets), chunk=chunk
    )
    logprobs = (entropy_N * push_N).sum() if alone else (found_N * pull_N).sum() + (entropy_N * push_N).sum()
    leaves = (hidden, weight, offset)
    for grad, expected_grad in zip(
        torch.autograd.grad(logprobs, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12)


def test_an_embedding_that_is_the_output_layer_too_gets_both_gradients() -> None:
    _, weight, offset, targets, temperatures = inputs(torch.float64)
    taken = torch.tensor([0, 3, 3, 10, 1, 2, 5])
    (expected,) = torch.autograd.grad(naive(weight[taken], weight, offset, targets, temperatures)[0].sum(), weight)
    logprobs, _, _ = chunked_logprobs(weight[taken], weight, None, targets, temperatures, chunk=2)
    (grad,) = torch.autograd.grad(logprobs.sum(), weight)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_goes_through_a_softmax_in_float32() -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.bfloat16)
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, None, targets, temperatures, chunk=3)
    assert logprobs.dtype == entropy.dtype == torch.float32
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, _ = naive(*exact, offset.double(), targets, temperatures)
    # A logit, of up to 6 here, is rounded to 8 bits, and not its log-softmax.
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=0.05)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=0.05, atol=0.05)


def test_the_weights_gradient_is_summed_in_float32_whatever_the_number_of_chunks() -> None:
    ones_NH, targets_N, temperatures_N = torch.ones(4096, 1), torch.zeros(4096, dtype=torch.int64), torch.ones(4096)
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _, _ = chunked_logprobs(ones_NH.bfloat16(), weight_VH, None, targets_N, temperatures_N, chunk=1)
    logprobs.sum().backward()
    # 4,096 times a half: a sum in bfloat16 stops growing at 128.
    assert weight_VH.grad is not None
    assert weight_VH.grad.flatten().tolist() == [2048.0, -2048.0]


def test_no_tokens_give_no_values_and_a_gradient_of_zero() -> None:
    weight = torch.ones(V, H, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, entropy, _ = chunked_logprobs(torch.empty(0, H, requires_grad=True), weight, None, none, torch.empty(0))
    logprobs.sum().backward()
    assert (len(logprobs), len(entropy)) == (0, 0)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_frozen_output_layer_passes_the_gradient_on() -> None:
    hidden, weight, _, targets, temperatures = inputs(torch.float64)
    both, alone = (
        torch.autograd.grad(
            chunked_logprobs(hidden, output_layer, None, targets, temperatures, chunk=3)[0].sum(), hidden
        )[0]
        for output_layer in (weight, weight.detach())
    )
    assert torch.equal(both, alone)


def test_extreme_logits_overflow_nothing() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, None, torch.tensor([0, 0]), torch.ones(2), chunk=1)
    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]


@st.composite
def kept_sets(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """(kept tokens of each of the N tokens, place of its target among them); none where all were kept."""
    ids = st.lists(st.integers(0, V - 1), unique=True, max_size=V)
    return draw(st.lists(ids, min_size=N, max_size=N)), draw(st.integers(0, 10))


@given(kept_sets(), st.sampled_from([1, 3, N, 100]), st.booleans())
def test_pi_is_renormalised_over_the_kept_tokens_of_each(
    drawn: tuple[list[list[int]], int], chunk: int, bias: bool
) -> None:
    sets, place = drawn
    hidden, weight, offset, _, temperatures = inputs(torch.float64, bias=bias)
    targets = torch.tensor([(ids or list(range(V)))[place % len(ids or range(V))] for ids in sets])
    pull_N = torch.linspace(-1, 2, N, dtype=torch.float64)
    expected, expected_entropy = naive(hidden, weight, offset, targets, temperatures, sets)
    leaves = (hidden, weight, offset) if bias else (hidden, weight)
    logprobs, entropy, _ = chunked_logprobs(
        hidden, weight, offset if bias else None, targets, temperatures, kept=kept_tokens(sets), chunk=chunk
    )
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad((logprobs * pull_N).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * pull_N).sum(), leaves)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_a_token_that_was_the_only_one_kept_is_certain_and_teaches_nothing() -> None:
    hidden, weight, _, targets, temperatures = inputs(torch.float32)
    only = KeptTokens(targets, torch.ones(N, dtype=torch.int64), np.ones(N, dtype=np.int64))
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, None, targets, temperatures, kept=only, chunk=3)
    assert not logprobs.any()
    assert not entropy.any()
    for grad in torch.autograd.grad(logprobs.sum(), (hidden, weight)):
        assert not grad.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "truncated"),
    [
        (LogitScale(), False),
        (LogitScale(divisor=0.5, cap=2.0), True),
        pytest.param(LogitScale(), True, marks=pytest.mark.extended),
        pytest.param(LogitScale(divisor=0.5, cap=2.0), False, marks=pytest.mark.extended),
    ],
)
def test_compiled_chunks_have_the_same_values_and_gradients(scale: LogitScale, truncated: bool) -> None:
    hidden, weight, offset, targets, temperatures = inputs(torch.float64, bias=True)
    kept = kept_tokens([[n, (n + 1) % V] if place % 2 else [] for place, n in enumerate(targets.tolist())])
    results = []
    for compiled in (False, True):
        logprobs, entropy, _ = chunked_logprobs(
            hidden, weight, offset, targets, temperatures,
            scale=scale, kept=kept if truncated else None, chunk=3, compiled=compiled,
        )  # fmt: skip
        total = (logprobs * torch.linspace(-1, 2, N)).sum() + (entropy * torch.linspace(1, -3, N)).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(total, (hidden, weight, offset))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
