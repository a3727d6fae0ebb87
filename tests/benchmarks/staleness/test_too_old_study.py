"""What the study of `staleness.too_old` makes of campaigns; the campaigns themselves are run by hand."""

import pytest

from benchmarks.staleness_study.lengths import mean_by_length, of_last_steps
from benchmarks.staleness_study.too_old import interval, shown, summarised, taken


def row(mode: str, seed: int, accuracy: float | None, **figures: object) -> dict[str, object]:
    done = accuracy is not None
    return {
        "too_old": mode,
        "seed": seed,
        "accuracy": accuracy,
        "prompts": 100 if done else None,
        "reward_mean": [0.9] + [0.2, 0.4] * 5 if done else [],
        "staleness_mean": 1.5 if done else None,
        "dropped_share": 0.25 if done else None,
        "masked_token_share": 0.0 if done else None,
        "length_ratio": 0.8 if done else None,
        **of_last_steps([trajectory(39, 18)] if done else [], 10),
        "seconds": 60.0 if done else None,
        "seconds_per_step": 1.0 if done else None,
        **figures,
    }


def trajectory(policy_version: int, tokens: int, **columns: object) -> dict[str, object]:
    """A row of the stream `consumed`."""
    stored = {"policy_version": policy_version, "tokens": tokens, "outcome": "trained", "masked_tokens": 0}
    return {**stored, "reward": 0.5, **columns}


def amounts(
    trained: tuple[int, int], masked: tuple[int, int], dropped: dict[str, tuple[int, int]]
) -> dict[str, object]:
    def json(amount: tuple[int, int]) -> dict[str, int]:
        return {"rollouts": amount[0], "tokens": amount[1]}

    return {
        "eval": {"end": {"accuracy": 0.5, "prompts": 192}},
        "wall_seconds": 77.0,
        "ledger": {
            "trained": json(trained),
            "masked": json(masked),
            "dropped": {reason: json(amount) for reason, amount in dropped.items()},
        },
    }


def test_shares_are_of_what_the_trainer_took_and_of_the_tokens_it_trained_on() -> None:
    found = taken(amounts((75, 3000), (10, 600), {"stale": (25, 2000), "error": (1, 9)}))
    assert found["dropped_share"] == pytest.approx(0.25)
    assert found["masked_token_share"] == pytest.approx(0.2)
    assert found["length_ratio"] == pytest.approx(40 / 50)
    assert (found["prompts"], found["seconds"]) == (192, 77.0)


def test_without_drops_the_trained_are_as_long_as_the_taken() -> None:
    found = taken(amounts((75, 3000), (0, 0), {}))
    assert (found["dropped_share"], found["masked_token_share"], found["length_ratio"]) == (0, 0, 1)


def test_a_campaign_that_did_not_finish_has_no_figures_and_accuracy_0() -> None:
    (cell,) = summarised([row("drop", 0, 0.6), row("drop", 1, None, **taken(None))])
    assert cell["accuracies"] == [0.6, 0.0]
    assert cell["dropped_share"] == pytest.approx(0.25)


def test_a_mode_is_compared_with_the_first_seed_by_seed() -> None:
    drop, mask = summarised([row("drop", 0, 0.5), row("mask", 0, 0.6), row("drop", 1, 0.7), row("mask", 1, 0.8)])
    assert drop["accuracy"] == pytest.approx(0.6)
    assert mask["difference"] == pytest.approx(0.1)
    assert mask["difference_interval"] == pytest.approx((0.1, 0.1))


def test_a_mode_with_fewer_seeds_than_the_first_is_not_compared_with_it() -> None:
    _, wait = summarised([row("drop", 0, 0.5), row("drop", 1, 0.5), row("wait", 0, 0.5)])
    assert "difference" not in wait
    assert shown(wait)[1] == "–"


def test_the_interval_grows_with_the_spread_over_seeds_and_shrinks_with_the_number_of_prompts() -> None:
    # Three seeds with a standard deviation of 0.1: t = 4.303 with two degrees of freedom.
    low, high = interval([0.4, 0.5, 0.6], None)
    assert (low, high) == pytest.approx((0.5 - 4.303 * 0.1 / 3**0.5, 0.5 + 4.303 * 0.1 / 3**0.5))
    assert interval([0.5, 0.5], 100) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05))
    assert interval([0.5], 400) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025))


def test_a_line_of_the_table_has_every_figure() -> None:
    first, second = summarised([row("drop", 0, 0.5), row("mask", 0, 0.75, dropped_share=None)])
    assert shown(first) == ["0.500 (0.402–0.598)", "–", "0.500", "0.800", "25.0%", "0.0%", "1.50", "60"]
    assert shown(second)[1:5] == ["+0.250 (+0.250 to +0.250)", "0.500", "0.800", "–"]


def test_the_reward_is_of_all_that_was_taken_in_the_last_steps_dropped_or_not() -> None:
    rows = [
        trajectory(30, 18, reward=1.0),
        trajectory(31, 18, reward=1.0),
        trajectory(40, 18, reward=0.0, outcome="stale"),
        trajectory(40, 18, reward=None, outcome="error"),
    ]
    assert of_last_steps(rows, 10)["reward_taken"] == pytest.approx(0.5)


def test_responses_are_told_apart_by_their_length() -> None:
    rows = [
        trajectory(40, 54, reward=1.0),
        trajectory(40, 55, masked_tokens=11),
        trajectory(40, 135, outcome="stale"),
        trajectory(40, 136, reward=0.0, outcome="stale"),
    ]
    found = of_last_steps(rows, 10)["by_length"]
    assert found["up to 6"] == {"taken": 1, "trained_share": 1.0, "masked_token_share": 0.0, "reward": 1.0}
    assert found["7 to 15"] == {"taken": 2, "trained_share": 0.5, "masked_token_share": 0.2, "reward": 0.5}
    assert found["more"] == {"taken": 1, "trained_share": 0.0, "masked_token_share": None, "reward": 0.0}


def test_the_mean_by_length_is_over_the_campaigns_that_have_the_figure() -> None:
    long, short = (of_last_steps([trajectory(40, tokens)], 10)["by_length"] for tokens in (200, 20))
    assert mean_by_length([long, short])["more"] == {"trained_share": 1.0, "masked_token_share": 0.0, "reward": 0.5}
    assert mean_by_length([short])["more"]["reward"] is None
