"""Campaigns that learn demonstrations: alone, from the rollouts of another run, and beside a judge and a teacher."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, Millrace, assert_balanced, await_end, final_weights, quick
from support.rewards.stub_service import graded, stub_service
from support.streams.rows import read_rows

from flows.cli.main import main
from millrace.prompts.stored import stored_parts
from millrace.replay.verify import verify
from millrace.runs.history import read_steps
from millrace.runs.record import latest_attempt
from storage import layout
from storage.schema import SCORE, TEACHER, TRAJECTORY

pytestmark = pytest.mark.campaign

STEPS = 8
WHERE = "reward >= 1 and policy_version <= 30"
KILLS = (
    "generate-0 generate.before_commit 3 kill",
    "generate-0 put.after:streams/trajectories/0/log/* 3 kill",
    "score-0 score.before_commit 2 kill",
    "train-0 train.mid_step 4 kill",
)

KILLS_OF_ALL = (
    "generate-0 generate.before_commit 3 kill",
    "score-0 score.before_commit 3 kill",
    "score-1 put.mid:streams/scores/*/seg/* 4 kill",
    "teach-0 teach.before_commit 3 kill",
    "train-0 train.mid_step 5 kill",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, each answered with its first summand between two signs: a format that nobody has shown the model."""
    sums = [(a, b) for a in range(100) for b in range(100 - a)]
    random.Random(0).shuffle(sums)
    path = tmp_path_factory.mktemp("shown") / "shown.jsonl"
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "response": f"={a:02d}="} for a, b in sums[:1500]]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def sft(millrace: Millrace, run_id: str, *arguments: str, **settings: object) -> list[str]:
    """The arguments of a quick campaign that learns demonstrations."""
    chosen = {**quick(), "generation.max_new_tokens": 8, "training.max_steps": STEPS, **settings}
    del chosen["generation.groups_per_batch"]
    sets = [part for key, value in chosen.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["sft", str(PRESET), "--root", str(millrace.root), "--run-id", run_id, *sets, *arguments]


def finish(millrace: Millrace, arguments: list[str]) -> None:
    await_end(millrace.start(*arguments), 400).expect_success()


def test_killed_at_any_place_it_ends_in_the_same_weights(millrace: Millrace, shown: Path, tmp_path: Path) -> None:
    finish(millrace, sft(millrace, "calm", **{"prompts.source": str(shown)}))
    armed = millrace.arm(tmp_path / "fired", *KILLS)
    arguments = sft(millrace, "killed", **{"prompts.source": str(shown)})
    process = millrace.start(*arguments)
    millrace.wait_for_version("killed", 5, 300, every=0.01)
    os.kill(process.pid, signal.SIGKILL)
    await_end(process, 60)
    finish(millrace, [*arguments, "--resume"])
    assert armed.missed() == []
    calm, killed = millrace.store("calm"), millrace.store("killed")
    assert final_weights(killed) == final_weights(calm)
    for run_id in ("calm", "killed"):
        summary = millrace.summary(run_id)
        assert_balanced(summary)
        assert (summary["state"], summary["steps"]) == ("finished", STEPS)
        millrace.run("fsck", millrace.store(run_id).url).expect_success()
    verdict = verify(killed)
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)
    rows = read_rows(calm, layout.trajectories(0), TRAJECTORY)
    assert {json.loads(row["meta"])["demonstration"] for row in rows} == {True}
    assert {value for row in rows for value in row["rollout_logprobs"]} == {0.0}


def test_it_learns_a_format_and_another_run_learns_it_from_its_rollouts(millrace: Millrace, shown: Path) -> None:
    settings = {
        "scoring.reward": "tests.support.rewards.own_rewards:framed",
        "training.learning_rate": 3e-3,
        "training.groups_per_step": 64,
        "training.max_steps": 80,
        "training.checkpoint_every": 40,
        "prompts.num_eval": 64,
    }
    finish(millrace, sft(millrace, "first", **settings, **{"prompts.source": str(shown)}))
    first = millrace.summary("first")
    assert first["eval"]["start"]["accuracy"] == 0.0
    assert first["eval"]["end"]["accuracy"] >= 0.95
    source = millrace.store("first").url
    few = {**settings, "training.max_steps": 4, "training.checkpoint_every": 4}
    finish(millrace, sft(millrace, "second", "--from", source, "--where", WHERE, **few))
    assert_balanced(millrace.summary("second"))
    attempt = latest_attempt(millrace.store("second"))
    assert attempt.inputs["prompts.source rollouts"] == stored_parts(source)
    assert attempt.config["prompts"]["where"] == WHERE
    # 30 steps of 64 demonstrations went several times through the file: each is learned once.
    assert attempt.inputs[f"prompts.source {source}"].startswith("1,436 prompts")
    stored = {
        tuple(row["response_tokens"]) for row in read_rows(millrace.store("first"), layout.trajectories(0), TRAJECTORY)
    }
    learned = {
        tuple(row["response_tokens"]) for row in read_rows(millrace.store("second"), layout.trajectories(0), TRAJECTORY)
    }
    assert learned <= stored


def test_rule_judge_teacher_and_demonstrations_share_one_exact_ledger(
    millrace: Millrace, shown: Path, tmp_path: Path
) -> None:
    with stub_service(graded(lambda response, expected: 10.0 if response == expected else 2.0)) as service:
        sources = {
            "rule": {},
            "judge": {"scoring": {"reward": "judge", "replicas": 1}},
            "teacher": {"training": {"distillation": {"teacher": "expert", "reward_coefficient": 0.0}}},
            "shown": {
                "prompts": {"source": str(shown), "demonstrations": True},
                "generation": {"group_size": 1, "max_new_tokens": 8},
                "training": {"loss": "cross_entropy"},
            },
        }
        settings = {
            "sources": sources,
            "teachers": {"expert": {"path": "start"}},
            "scoring.endpoint.url": service.url,
            "scoring.judge.model": "large",
            "training.max_steps": STEPS,
            "evaluation.every": None,
        }
        armed = millrace.arm(tmp_path / "fired", *KILLS_OF_ALL)
        summary = millrace.finish("all", **settings)
        assert armed.missed() == []
    store = millrace.store("all")
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert_balanced(summary)
    millrace.run("fsck", store.url).expect_success()

    trajectories = read_rows(store, layout.trajectories(0), TRAJECTORY)
    assert {row["source"] for row in trajectories} == sources.keys()
    for row in trajectories:
        is_shown = row["source"] == "shown"
        assert ("demonstration" in json.loads(row["meta"])) == is_shown
        assert (set(row["rollout_logprobs"]) == {0.0}) == is_shown
    for stream, schema in (("scores/exact_match@judge", SCORE), ("teachers/expert", TEACHER)):
        annotated = read_rows(store, layout.annotations(stream, 0, 0, 1), schema)
        assert [row["row_id"] for row in annotated] == [*range(len(annotated))]
        name = stream.partition("@")[2] or "teacher"
        of_source = {trajectories[row["row_id"]]["source"] for row in annotated if row["status"] == "ok"}
        assert of_source == {name}

    steps = [step.values for step in read_steps(store) if "loss" in step.values]
    assert all(values["groups_trained/shown"] > 0 and values["groups_trained/judge"] > 0 for values in steps)
    # The judge is gone.
    verdict = verify(store)
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)


def test_mistakes_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, shown: Path) -> None:
    root, model = tmp_path / "runs", quick()["model.path"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "1", "response": "2"}\n{"prompt": "1"}\n')
    for arguments, named in (
        (["--set", f"prompts.source={asked}"], [f"{asked} line 2", "response"]),
        (["--set", f"prompts.source={shown}", "generation.max_new_tokens=2"], ["shown.jsonl:", "max_new_tokens"]),
        (["--set", "prompts.source=arithmetic"], ["prompts.source", "arithmetic"]),
        (["--set", f"prompts.source={shown}", "training.loss=aipo"], ["training.loss", "cross_entropy"]),
        (["--set", f"prompts.source={shown}", "prompts.where=reward > 0"], ["prompts.source", "stored run"]),
        (["--where", "reward > 0"], ["--where", "--from"]),
        (["--from", str(tmp_path / "nothing")], ["prompts.source", "nothing"]),
    ):
        sets = ["--set", f"model.path={model}", *arguments]
        assert main(["sft", str(PRESET), "--root", str(root), *sets]) == 2
        message = capsys.readouterr().err
        assert [word for word in named if word not in message] == []
        assert len(message.strip().splitlines()) == 1
        assert not root.exists()
