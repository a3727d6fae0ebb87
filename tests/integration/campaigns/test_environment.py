"""A whole campaign whose policy uses a calculator between its turns."""

import itertools
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced

from millrace.generation.environments.calculator import Calculator
from millrace.models.loading import load_tokenizer
from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign

PRESET = REPOSITORY / "configs" / "presets" / "calculator-cpu.yaml"
QUICK = {
    # By then most answers follow a call of the calculator.
    "model.warm_start_steps": 300,
    "training.max_steps": 4,
    "training.groups_per_step": 8,
    "training.checkpoint_every": 2,
    "generation.groups_per_batch": 4,
    "prompts.num_eval": 32,
    "promotion.margin": "null",
}


def stored(run: Path, path: str, schema: object) -> list[dict[str, object]]:
    reader, rows = StreamReader(open_store(str(run)), path, schema), []
    while (part := reader.next()) is not None:
        rows += part.table.to_pylist()
    return rows


@pytest.mark.extended
def test_a_campaign_with_a_tool_runs_to_its_end_and_accounts_for_every_token_of_either_side(
    millrace_alone: Millrace,
) -> None:
    sets = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    ended = millrace_alone.run("run", str(PRESET), "--root", str(millrace_alone.root), "--run-id", "tool", *sets)
    assert ended.code == 0, ended.output
    summary = millrace_alone.summary("tool")
    assert summary["state"] == "finished"
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 4 * 8 * 8
    assert set(summary["eval"]) == {"start", "end"}

    run = millrace_alone.root / "tool"
    rows = stored(run, layout.trajectories(0), TRAJECTORY)
    assert summary["ledger"]["generated"]["tokens"] == sum(len(row["response_tokens"]) for row in rows)
    tokenizer, calculator = load_tokenizer(run / layout.START_MODEL), Calculator()
    used = 0
    for row in rows:
        assert len(row["response_tokens"]) <= 16
        pieces = [
            (mask, tokenizer.decode([token for token, _ in piece]))
            for mask, piece in itertools.groupby(
                zip(row["response_tokens"], row["loss_mask"], strict=True), key=lambda pair: pair[1]
            )
        ]
        for (_, turn), (mask, answer) in itertools.pairwise(pieces):
            if mask == 0:
                used += 1
                # The budget may have cut it.
                assert calculator.step(turn).text.startswith(answer)
    # Three in ten demonstrations call it.
    assert used > len(rows) / 10
    scores = stored(run, layout.scores("exact_match", 0, 0, 1), SCORE)
    assert {score["status"] for score in scores} == {"ok"}
