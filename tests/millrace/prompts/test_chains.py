"""Chains of sums: each is written out step by step, and a few are many times as long as most."""

import statistics

from millrace.prompts.sums import chain_prompts, last_digit, written_out
from millrace.types import Prompt


def num_sums(prompt: Prompt) -> int:
    return int(prompt.text.partition(":")[0])


def test_a_chain_is_written_out_sum_by_sum_and_counts_down() -> None:
    assert written_out("04:7+5=", last_digit) == "2 03:5+2=7 02:2+7=9 01:7+9=6"


def test_a_wrong_sum_is_carried_on() -> None:
    assert written_out("03:7+5=", lambda a, b: 1) == "1 02:5+1=1 01:1+1=1"


def test_a_prompt_has_its_chains_last_digit_as_its_answer() -> None:
    for prompt in chain_prompts():
        numbers = [int(digit) for digit in prompt.text.rstrip("=").partition(":")[2].split("+")]
        for _ in range(num_sums(prompt)):
            numbers.append((numbers[-2] + numbers[-1]) % 10)
        assert prompt.answer == "{}+{}={}".format(*numbers[-3:])
        assert prompt.prompt_id == f"chain-{prompt.text}"
        assert prompt.source == "chains"


def test_lengths_have_a_long_tail() -> None:
    prompts = chain_prompts()
    lengths = [len(written_out(prompt.text, last_digit)) for prompt in prompts]
    assert max(lengths) >= 5 * statistics.fmean(lengths)
    assert statistics.median(lengths) < statistics.fmean(lengths)
    assert max(lengths) > 300


def test_chains_keep_to_their_limits_and_differ() -> None:
    prompts = chain_prompts()
    assert min(map(num_sums, prompts)) == 2
    assert max(map(num_sums, prompts)) <= 40
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


def test_the_chains_are_the_ones_that_stored_runs_were_made_with() -> None:
    assert [prompt.text for prompt in chain_prompts()[:4]] == ["02:8+7=", "02:4+7=", "02:3+8=", "02:1+9="]
