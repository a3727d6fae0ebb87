"""A whole campaign whose policy uses a calculator between its turns."""

import itertools

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced
from support.streams.rows import read_rows

from millrace.generation.environments.calculator import Calculator
from millrace.models.loading import load_tokenizer
from storage import layout
from storage.schema import SCORE, TRAJECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

PRESET = REPOSITORY / "configs" / "presets" / "calculator-cpu.yaml"
QUICK = {
    # All demonstrations call the calculator: that much is learnt in a few steps.
    "model.bootstrap.error_rate": 0.0,
    "model.bootstrap.max_steps": 60,
    "training.max_steps": 4,
    "training.groups_per_step": 8,
    "training.checkpoint_every": 2,
    "generation.groups_per_batch": 4,
    "evaluation.num_prompts": 32,
    "promotion.margin": "null",
}


def test_a_campaign_with_a_tool_accounts_for_every_token_of_either_side(millrace_alone: Millrace) -> None:
    sets = [f"{key}={value}" for key, value in QUICK.items()]
    root = str(millrace_alone.root)
    millrace_alone.run("run", str(PRESET), "--root", root, "--run-id", "tool", "--set", *sets).expect_success()
    summary = millrace_alone.summary("tool")
    assert summary["state"] == "finished"
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 4 * 8 * 8
    assert set(summary["eval"]) == {"start", "end"}

    store = millrace_alone.store("tool")
    rows = read_rows(store, layout.trajectories(0), TRAJECTORY)
    assert summary["ledger"]["generated"]["tokens"] == sum(len(row["response_tokens"]) for row in rows)
    tokenizer, calculator = load_tokenizer(millrace_alone.root / "tool" / layout.START_MODEL), Calculator()
    calls = 0
    for row in rows:
        assert len(row["response_tokens"]) <= 16
        tokens = zip(row["response_tokens"], row["loss_mask"], strict=True)
        pieces = [
            (mask, tokenizer.decode([token for token, _ in piece]))
            for mask, piece in itertools.groupby(tokens, key=lambda pair: pair[1])
        ]
        for (_, turn), (mask, answer) in itertools.pairwise(pieces):
            if mask == 0:
                calls += 1
                # The budget may have cut it.
                assert calculator.step(turn).text.startswith(answer)
    assert calls > len(rows) / 2
    assert {score["status"] for score in read_rows(store, layout.scores("exact_match", 0, 0, 1), SCORE)} == {"ok"}
