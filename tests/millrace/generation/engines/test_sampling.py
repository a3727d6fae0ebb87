"""Token draws and their random numbers."""

import math
from collections import Counter

import pytest
import torch

from millrace.generation.engines.sampling import draw, uniforms
from millrace.types import Sampling

NUM_DRAWS = 20_000
PROBABILITIES = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.1, 0.025])
LOGITS = PROBABILITIES.log() + 3.0


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=1)


def drawn(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None
) -> tuple[dict[int, float], dict[int, float]]:
    """(share of each token among many draws, its log-probability as told)."""
    uniforms_B = uniforms([7] * NUM_DRAWS, range(NUM_DRAWS))
    tokens_B, logprobs_B, _ = draw(LOGITS.expand(NUM_DRAWS, -1), sampling(temperature, top_p, top_k), uniforms_B)
    reported = dict(zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True))
    return {token: count / NUM_DRAWS for token, count in Counter(tokens_B.tolist()).items()}, reported


def assert_shares(shares: dict[int, float], reported: dict[int, float], expected: dict[int, float]) -> None:
    assert reported.keys() == expected.keys()
    for token, probability in expected.items():
        assert reported[token] == pytest.approx(math.log(probability), abs=1e-6)
        # Five standard deviations.
        assert shares[token] == pytest.approx(probability, abs=5 * math.sqrt(probability / NUM_DRAWS))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_log_probabilities_say(temperature: float) -> None:
    flat = PROBABILITIES ** (1 / temperature)
    expected = {token: p for token, p in enumerate((flat / flat.sum()).tolist()) if p}
    assert_shares(*drawn(temperature=temperature), expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, 0.01, [0]),
        (None, 0.5, [0]),
        (None, 0.51, [0, 2]),
        (None, 0.9, [0, 2, 3, 4]),
        (1, 1.0, [0]),
        (4, 1.0, [0, 2, 3, 4]),
        # The fifth has no probability, and there is no seventh.
        (7, 1.0, [0, 2, 3, 4, 5]),
        # Half of the mass of the two likeliest, and more than half of it.
        (2, 0.66, [0]),
        (2, 0.67, [0, 2]),
        (3, 0.86, [0, 2, 3]),
    ],
)
def test_top_k_keeps_that_many_and_top_p_the_smallest_set_of_its_share(
    top_k: int | None, top_p: float, kept: list[int]
) -> None:
    mass = PROBABILITIES[kept].sum().item()
    assert_shares(*drawn(top_p=top_p, top_k=top_k), {token: PROBABILITIES[token].item() / mass for token in kept})


def test_what_each_row_was_drawn_from_is_told_and_nothing_if_all_was_kept() -> None:
    logits_BV = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(6)])
    uniforms_B = uniforms([1, 2, 3], [0, 0, 0])
    kept = draw(logits_BV, sampling(top_p=0.7), uniforms_B).kept
    assert kept is not None
    assert kept[:2] == [[0, 2], [5, 3]]
    assert len(kept[2]) == 5, "of a flat distribution nearly everything is kept"
    assert draw(logits_BV, sampling(), uniforms_B).kept is None


def test_temperature_comes_before_top_p() -> None:
    flat = PROBABILITIES.sqrt() / PROBABILITIES.sqrt().sum()
    kept = flat[[0, 2, 3]] / flat[[0, 2, 3]].sum()
    assert_shares(*drawn(temperature=2.0, top_p=0.7), dict(zip([0, 2, 3], kept.tolist(), strict=True)))


def test_greedy_decoding_takes_the_likeliest_token_of_each_row() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    tokens_B, logprobs_B, kept = draw(logits_BV, sampling(temperature=0.0, top_p=0.1), uniforms([1, 2], [0, 0]))
    assert tokens_B.tolist() == [1, 0]
    assert kept is None
    assert logprobs_B.tolist() == pytest.approx(torch.log_softmax(logits_BV, dim=-1)[[0, 1], [1, 0]].tolist())


def test_the_largest_and_the_smallest_number_draw_tokens_that_can_be_drawn() -> None:
    logits_BV = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf]]).expand(2, -1)
    extremes_B = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for top_p in (1.0, 0.99):
        assert draw(logits_BV, sampling(top_p=top_p), extremes_B)[0].tolist() == ([1, 2] if top_p == 1 else [2, 1])


def test_a_token_of_one_in_a_hundred_million_is_drawn_as_often_as_that() -> None:
    # In float32 the cumulated mass would round it away.
    logits_BV = torch.tensor([0.5, 0.5, 1e-8, 1e-8]).log().expand(2, -1)
    within_B = torch.tensor([1 - 1.5e-8, 1 - 0.5e-8], dtype=torch.float64)
    assert draw(logits_BV, sampling(), within_B)[0].tolist() == [2, 3]


def test_a_uniform_number_depends_on_the_seed_and_the_position_alone() -> None:
    seeds, positions = [3, 2**63 - 1, 3, 0], [0, 5, 1, 0]
    together = uniforms(seeds, positions).tolist()
    alone = [uniforms([seed], [position]).item() for seed, position in zip(seeds, positions, strict=True)]
    assert together == alone
    assert len(set(together)) == 4
    assert all(0 <= number < 1 for number in together)


@pytest.mark.parametrize("across", ["seeds", "positions", "both"])
def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_unrelated(across: str) -> None:
    n = NUM_DRAWS
    seeds = range(n) if across != "positions" else [11] * n
    positions = range(n) if across != "seeds" else [11] * n
    numbers_N = uniforms(seeds, positions)
    lags = torch.corrcoef(torch.stack([numbers_N[: n - 3], numbers_N[1 : n - 2], numbers_N[3:]]))
    assert (lags - torch.eye(3)).abs().max() < 5 / math.sqrt(n)
    shares = torch.histc(numbers_N, bins=20, min=0, max=1) / n
    assert (shares - 0.05).abs().max() < 5 * math.sqrt(0.05 / n)
