"""Whole campaigns of several turns: chat in the model's template, and a calculator between turns."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced
from support.chat.model_folder import chat_model_folder
from support.chat.tokenizers import TEMPLATES
from support.streams.rows import read_rows
from transformers import AutoTokenizer

from millrace.generation.environments.calculator import Calculator
from millrace.models.loading import load_tokenizer
from storage import layout
from storage.schema import SCORE, TRAINER_LOGPROBS, TRAJECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.extended]


def test_conversations_are_trained_token_by_token_as_they_were_sampled(
    millrace_alone: Millrace, tmp_path: Path
) -> None:
    folder = chat_model_folder(tmp_path / "model")
    source = tmp_path / "prompts.jsonl"
    records = [{"messages": [{"role": "user", "content": f"say {n}"}], "answer": "ae"[n % 2]} for n in range(24)]
    source.write_text("\n".join(map(json.dumps, records)))
    # Another template than the model's own, which the export must have too.
    template = tmp_path / "other.jinja"
    template.write_text((TEMPLATES / "chatml_tools.jinja").read_text().replace("tool_response", "response"))
    settings = {
        "model.chat_template": str(template),
        "model.path": str(folder),
        "pipeline.mode": "sync",
        "prompts.source": str(source),
        "prompts.system_prompt": "Be brief.",
        "environment.name": "tests.support.chat.curious:Curious",
        "scoring.answer_pattern": "([ae])",
        "generation.max_new_tokens": 120,
        "prompts.num_eval": 4,
        "training.max_steps": 3,
        "training.groups_per_step": 4,
        "generation.groups_per_batch": 4,
    }
    summary = millrace_alone.finish("chat", **settings)
    assert summary["ledger"]["trained"]["rollouts"] == 3 * 4 * 8

    store = millrace_alone.store("chat")
    rows = {row["row_id"]: row for row in read_rows(store, layout.trajectories(0), TRAJECTORY)}
    for row in rows.values():
        roles, starts = row["message_roles"], row["message_starts"]
        assert roles[:3] == ["system", "user", "assistant"]
        assert starts == sorted(starts)
        assert set(roles[3:]) <= {"user", "assistant"}
        mask = [1] * len(row["prompt_tokens"]) + row["loss_mask"]
        assert all(mask[start] == 0 for role, start in list(zip(roles, starts, strict=True))[3:] if role == "user")
        assert json.loads(row["meta"])["prompt"].startswith("say ")
    assert sum(len(row["message_roles"]) > 4 for row in rows.values()) > len(rows) / 2
    for trained in read_rows(store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS):
        row = rows[trained["trajectory_row_id"]]
        ratios = np.exp(np.array(trained["trainer_logprobs"]) - np.array(row["rollout_logprobs"]))
        np.testing.assert_allclose(ratios[np.array(row["loss_mask"]) == 1], 1.0, atol=1e-4)

    exported = tmp_path / "exported"
    millrace_alone.run("export", str(millrace_alone.root / "chat"), "--to", str(exported)).expect_success()
    assert AutoTokenizer.from_pretrained(exported).chat_template == template.read_text()


PRESET = REPOSITORY / "configs" / "presets" / "calculator-cpu.yaml"
QUICK = {
    # By then three in ten answers follow a call of the calculator.
    "model.warm_start_steps": 300,
    "training.max_steps": 4,
    "training.groups_per_step": 8,
    "training.checkpoint_every": 2,
    "generation.groups_per_batch": 4,
    "prompts.num_eval": 32,
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
    assert calls > len(rows) / 10
    assert {
        score["status"] for score in read_rows(store, layout.annotations("scores/exact_match", 0, 0, 1), SCORE)
    } == {"ok"}
