"""Each loss, averaged over a batch, against its paper's objective: values and gradients, in float64.

    random responses ─┬─► Loss, token_scale         ─► Σ scale · loss, its gradient by log π
                      └─► support.training.papers   ─► −objective,     its gradient by log π

Responses have 0 to 5 tokens; some tokens are masked. Ratios reach from e^−25 to e^25.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.training import papers
from support.training.bandit import make
from support.training.papers import AGGREGATIONS, Rows, Terms

from millrace.training.losses.base import LossInputs
from millrace.training.losses.factory import LOSSES, Loss
from millrace.training.objective import token_scale

MOST_TOKENS = 5
SAME_VALUE = [
    (make("reinforce"), papers.reinforce, "token_mean"),
    (make("ppo_clip", clip_low=0.2, clip_high=0.28), papers.ppo_clip(0.2, 0.28), "token_mean"),
    (make("ppo_clip", clip_low=0.2, clip_high=0.2), papers.ppo_clip(0.2, 0.2), "sequence_mean"),
    (make("ppo_clip", clip_low=0.2, clip_high=0.2, dual_clip=3), papers.dual_clip(0.2, 0.2, 3), "token_mean"),
    (make("decoupled_ppo", proximal="recomputed"), papers.decoupled_ppo(0.2, 0.2, interpolated=False), "token_mean"),
    (make("decoupled_ppo", proximal="interpolated"), papers.decoupled_ppo(0.2, 0.2, interpolated=True), "token_mean"),
    (make("aipo", max_importance_ratio=4), papers.truncated(4), "token_mean"),
    (make("tis", max_importance_ratio=2), papers.truncated(2), "sequence_mean"),
    (make("sequence_tis", max_importance_ratio=2), papers.sequence_tis(2), "sequence_mean"),
    (make("cispo", clip_high=0.3), papers.truncated(1.3), "token_mean"),
    (make("geometric_mask"), papers.geometric_mask(0.1, 10, 2), "sequence_mean"),
    (make("gspo", clip_low=0.1, clip_high=0.2), papers.gspo(0.1, 0.2), "sequence_mean"),
    (make("sapo"), papers.sapo(1, 1.05), "sequence_mean"),
    (make("dppo_tv"), papers.dppo_tv(0.15, 20), "token_mean"),
    (make("topr"), papers.topr, "constant"),
]
"""Losses whose value is that of the paper's objective, with the paper's average where it names one."""
SAME_GRADIENT = [
    # The paper's term is r A; ours has its gradient and the value r A log π.
    (make("icepop"), papers.icepop(0.5, 5), "token_mean"),
    # The paper's ratio of a response is differentiated as a whole; ours stands with each token.
    (make("sequence_mask"), papers.sequence_mask(0.5, 2), "constant"),
]
"""Losses that have the gradient of the paper's objective and another value."""
BOUNDS = (0.1, 0.5, 0.8, 0.9, 1.2, 1.28, 1.3, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Bounds on ratios above, where formulas have a kink or a step."""

logprobs = st.floats(-25, 0)
near = st.floats(-0.5, 0.5)
tokens = st.tuples(logprobs, logprobs | near, st.booleans())


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """One to four responses; a token's μ is anywhere, or close to π."""
    responses = draw(st.lists(st.lists(tokens, max_size=MOST_TOKENS), min_size=1, max_size=4))
    shape = (len(responses), MOST_TOKENS)
    pi_BT, mu_BT = torch.full(shape, -1.0, dtype=torch.float64), torch.full(shape, -7.0, dtype=torch.float64)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    for b, response in enumerate(responses):
        for t, (pi, second, counts) in enumerate(response):
            pi_BT[b, t], mask_BT[b, t] = pi, counts
            mu_BT[b, t] = second if second < -0.5 else min(0.0, pi + second)
    assume(bool(mask_BT.any()))
    return Rows(
        pi_BT=pi_BT,
        mu_BT=mu_BT,
        mask_BT=mask_BT,
        advantages_B=torch.tensor(
            draw(st.lists(st.sampled_from((-2.5, -1.0, 0.0, 0.125, 1.0)), min_size=shape[0], max_size=shape[0])),
            dtype=torch.float64,
        ),
        staleness_B=torch.tensor(draw(st.lists(st.integers(0, 4), min_size=shape[0], max_size=shape[0]))),
    )


def value_and_gradient(
    rows: Rows, objective: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    pi_BT = rows.pi_BT.clone().requires_grad_()
    value = objective(pi_BT)
    (gradient_BT,) = torch.autograd.grad(value, pi_BT)
    return value.detach(), gradient_BT


def published(rows: Rows, terms: Terms, aggregation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of the paper's loss."""
    average = AGGREGATIONS[aggregation]
    return value_and_gradient(
        rows, lambda pi_BT: -average(terms(replace(rows, pi_BT=pi_BT)), rows.mask_BT, MOST_TOKENS)
    )


def ours(
    rows: Rows, loss: Loss, aggregation: str, groups_B: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of the trainer's loss: ragged tokens, response after response."""
    groups_B = torch.arange(len(rows.advantages_B)) if groups_B is None else groups_B
    response_N = rows.mask_BT.nonzero()[:, 0]
    scale_Q = token_scale(aggregation, rows.mask_BT.sum(1), torch.full_like(groups_B, MOST_TOKENS), groups_B)

    def objective(pi_BT: torch.Tensor) -> torch.Tensor:
        outputs = loss(
            LossInputs(
                trainer_logprobs_N=pi_BT[rows.mask_BT],
                rollout_logprobs_N=rows.mu_BT[rows.mask_BT],
                advantages_N=rows.advantages_B[response_N],
                response_N=response_N,
                num_responses=len(rows.advantages_B),
                staleness_N=rows.staleness_B[response_N],
                before_logprobs_N=None if rows.before_BT is None else rows.before_BT[rows.mask_BT],
            )
        )
        return (scale_Q[response_N] * outputs.loss).sum()

    return value_and_gradient(rows, objective)


def away_from_kinks(rows: Rows) -> None:
    ratios = torch.cat([rows.ratios.flatten(), rows.products.flatten(), rows.geometric_means.flatten()])
    prox = (rows.log_ratios / rows.staleness_B[:, None].clamp(min=1)).exp().flatten()
    moved = (rows.pi_BT.exp() - rows.mu_BT.exp()).abs().flatten()
    bounds = torch.tensor(BOUNDS, dtype=torch.float64)
    assume(bool(((torch.cat([ratios, prox])[:, None] / bounds).log().abs() > 1e-9).all()))
    assume(bool(((moved - 0.15).abs() > 1e-9).all()))


Differentiated = tuple[torch.Tensor, torch.Tensor]
"""A value and its gradient by log π, [B, T]."""


def assert_same(actual: Differentiated, expected: Differentiated, *, only_gradient: bool = False) -> None:
    """The terms of a value are as large as its gradient's, and may cancel."""
    largest = max(1.0, float(expected[1].abs().max()))
    if not only_gradient:
        torch.testing.assert_close(
            actual[0], expected[0], rtol=1e-11, atol=1e-13 * max(largest, float(expected[0].abs()))
        )
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-11, atol=1e-13 * largest)


def name(value: object) -> str | None:
    return value.name if isinstance(value, Loss) else getattr(value, "__qualname__", str(value)).split(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "terms", "aggregation"), SAME_VALUE + SAME_GRADIENT, ids=name)
@settings(max_examples=50)
@given(rows=batches())
def test_a_loss_has_the_gradient_of_the_published_objective_and_most_have_its_value(
    loss: Loss, terms: Terms, aggregation: str, rows: Rows
) -> None:
    away_from_kinks(rows)
    only_gradient = loss.name in [loss.name for loss, _, _ in SAME_GRADIENT]
    assert_same(ours(rows, loss, aggregation), published(rows, terms, aggregation), only_gradient=only_gradient)


@settings(max_examples=50)
@given(rows=batches(), moved=st.lists(st.floats(-1, 1), min_size=4 * MOST_TOKENS, max_size=4 * MOST_TOKENS))
def test_in_a_later_update_decoupled_ppo_clips_against_the_policy_before_the_first(
    rows: Rows, moved: list[float]
) -> None:
    moved_BT = torch.tensor(moved, dtype=torch.float64).view(4, MOST_TOKENS)[: len(rows.pi_BT)]
    assume(bool(((moved_BT.exp()[..., None] / torch.tensor(BOUNDS)).log().abs() > 1e-6).all()))
    # The same batch after earlier updates that moved log π.
    later = replace(rows, before_BT=rows.pi_BT - moved_BT)
    expected = published(later, papers.decoupled_ppo(0.2, 0.2, interpolated=False), "token_mean")
    assert_same(ours(later, make("decoupled_ppo", proximal="recomputed"), "token_mean"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=50)
@given(rows=batches())
def test_an_average_is_the_published_one_with_responses_that_are_empty(aggregation: str, rows: Rows) -> None:
    expected = published(rows, papers.reinforce, aggregation)
    assert_same(ours(rows, make("reinforce"), aggregation), expected)


@settings(max_examples=50)
@given(rows=batches(), groups=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_the_mean_over_prompts_is_the_published_one(rows: Rows, groups: list[int]) -> None:
    groups_B = torch.tensor(groups[: len(rows.pi_BT)])
    expected = value_and_gradient(
        rows, lambda pi_BT: -papers.prompt_mean(papers.reinforce(replace(rows, pi_BT=pi_BT)), rows.mask_BT, groups_B)
    )
    assert_same(ours(rows, make("reinforce"), "prompt_mean", groups_B), expected)


def test_every_loss_is_compared_with_a_publication() -> None:
    assert {loss.name for loss, _, _ in SAME_VALUE + SAME_GRADIENT} == set(LOSSES) - {"cross_entropy"}
