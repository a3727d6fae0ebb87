"""The comparison with TRL: its figures for two runs, and the input of both; the runs are made by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.trl.runs import TimedStep, of_pair, of_pairs, targets_met
from benchmarks.trl.shapes import SHAPES, write_prompts

SHORT = SHAPES["short"]


def steps(seconds: float, rewards: list[float], *, first: float = 100.0) -> list[TimedStep]:
    return [TimedStep(t=first + seconds * i, reward=reward, response_tokens=3) for i, reward in enumerate(rewards)]


def test_speeds_and_rewards_are_compared_after_the_warm_up() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    pair = of_pair(steps(2.0, rewards), steps(0.5, rewards), SHORT, warmup=2)
    assert pair["speedup"] == pair["tokens_speedup"] == pytest.approx(4)
    assert pair["trl"]["seconds_per_step"] == pytest.approx(2)
    assert pair["millrace"]["tokens_per_second"] == pytest.approx(512 * 10 / 0.5)
    # The faster run takes 3.5 s from its first step on; the slower one has made two steps by then.
    assert pair["equal_seconds"] == pytest.approx(3.5)
    assert pair["millrace"]["reward_after_equal_time"] == pair["trl"]["reward_last"] == pytest.approx(0.65)
    assert pair["trl"]["reward_after_equal_time"] == pytest.approx(0.05)


def test_the_target_is_twice_the_speed_at_a_reward_that_is_no_lower() -> None:
    trl_steps = steps(1.0, [0.5] * 8)
    fast, slow = steps(0.4, [0.5] * 8), steps(0.9, [0.5] * 8)
    result = of_pairs([of_pair(trl_steps, ours, SHORT, warmup=1) for ours in (fast, slow, fast)])
    assert result["speedup"] == pytest.approx(2.5)
    assert list(targets_met({"short": result}).values()) == [True, True]
    worse = of_pairs([of_pair(trl_steps, steps(0.9, [0.4] * 8), SHORT, warmup=1)])
    assert list(targets_met({"short": worse}).values()) == [False, False]


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_have_the_tokens_of_their_shape_and_answers_fit(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    write_prompts(shape, tmp_path / "prompts.jsonl")
    records = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    # One token begins a prompt, and one ends an answer.
    assert {len(record["prompt"]) + 1 for record in records} == {shape.prompt_tokens}
    assert max(len(record["answer"]) + 1 for record in records) <= shape.max_new_tokens
