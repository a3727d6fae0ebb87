"""A whole campaign in chat: lists of messages, several turns in the model's template, an export that speaks it too."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.chat.model_folder import chat_model_folder
from support.chat.tokenizers import TEMPLATES
from transformers import AutoTokenizer

from storage import layout
from storage.schema import TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign


def stored(run: Path, path: str, schema: object) -> list[dict[str, object]]:
    reader, rows = StreamReader(open_store(str(run)), path, schema), []
    while (part := reader.next()) is not None:
        rows += part.table.to_pylist()
    return rows


@pytest.mark.extended
def test_conversations_are_trained_token_by_token_as_they_were_sampled(
    millrace_alone: Millrace, tmp_path: Path
) -> None:
    folder = chat_model_folder(tmp_path / "model")
    source = tmp_path / "asked.jsonl"
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
    ended = millrace_alone.run(*millrace_alone.campaign("chat", **settings))
    assert ended.code == 0, ended.output
    summary = millrace_alone.summary("chat")
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 3 * 4 * 8

    run = millrace_alone.root / "chat"
    rows = {row["row_id"]: row for row in stored(run, layout.trajectories(0), TRAJECTORY)}
    several = 0
    for row in rows.values():
        roles, starts = row["message_roles"], row["message_starts"]
        assert roles[:3] == ["system", "user", "assistant"]
        assert starts == sorted(starts)
        assert set(roles[3:]) <= {"user", "assistant"}
        several += len(roles) > 4
        mask = [1] * len(row["prompt_tokens"]) + row["loss_mask"]
        assert all(mask[start] == 0 for role, start in list(zip(roles, starts, strict=True))[3:] if role == "user")
        assert json.loads(row["meta"])["prompt"].startswith("say ")
    assert several > len(rows) / 2
    for trained in stored(run, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS):
        row = rows[trained["trajectory_row_id"]]
        ratios = np.exp(np.array(trained["trainer_logprobs"]) - np.array(row["rollout_logprobs"]))
        np.testing.assert_allclose(ratios[np.array(row["loss_mask"]) == 1], 1.0, atol=1e-4)

    exported = tmp_path / "exported"
    ended = millrace_alone.run("export", str(run), "--to", str(exported))
    assert ended.code == 0, ended.output
    assert AutoTokenizer.from_pretrained(exported).chat_template == template.read_text()
