"""Campaigns whose trainer is spread over ranks: to everything else it is one stage, whatever becomes of a rank."""

import json
import signal
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, Millrace, assert_balanced, send, stages_of, wait_until

from flows.cli.main import main
from millrace.runs.history import read_steps
from storage.checkpoints import read_latest

pytestmark = pytest.mark.campaign

ROLLOUTS_PER_STEP = 16 * 8
TWO = {"training.parallel.data": 2}


@pytest.mark.extended
def test_a_campaign_on_two_ranks_outlives_one_drains_and_goes_on_with_one(millrace: Millrace, tmp_path: Path) -> None:
    armed = millrace.arm(tmp_path / "fired", "train-0.1 train.mid_step 3 kill")
    process = millrace.start(*millrace.campaign("spread", **TWO, **{"training.max_steps": 100_000}))
    wait_until(lambda: not armed.missed(), "the second rank to be killed")
    millrace.wait_for_version("spread", 5)
    ended = send(process, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert stages_of(millrace.root / "spread") == []
    stopped = millrace.status("spread")
    assert_balanced(stopped)
    checkpoint = read_latest(millrace.store("spread"))
    assert checkpoint is not None
    assert checkpoint.step == stopped["steps"], "every step is checkpointed"
    assert "model-1-of-2.safetensors" in checkpoint.files
    assert checkpoint.incarnation == 1, "the trainer was started again once"

    last = stopped["steps"] + 2
    summary = millrace.finish("spread", "--resume", **{"training.max_steps": last})
    assert (summary["state"], summary["steps"]) == ("finished", last)
    assert summary["ledger"]["trained"]["rollouts"] == last * ROLLOUTS_PER_STEP


@pytest.mark.extended
def test_the_verification_on_one_rank_of_a_run_on_two_says_what_differs(millrace: Millrace) -> None:
    assert millrace.finish("whole", **TWO, **{"training.max_steps": 3})["steps"] == 3
    assert stages_of(millrace.root / "whole") == []
    replay = ["replay", str(millrace.root / "whole"), "--root", str(millrace.root)]
    # Where a gradient is 0 but for rounding, AdamW takes a whole step all the same, either way.
    millrace.run(*replay, "--run-id", "near", "--verify", "--tolerance", "0.01").expect_success()
    verdict = json.loads((millrace.root / "near" / "replay" / "verdict.json").read_text())
    assert verdict["unlike"] == {"training.parallel.data": [2, 1]}


def test_a_campaign_on_two_ranks_without_a_compiler_trains_uncompiled_and_says_so_once(millrace: Millrace) -> None:
    millrace.environment["CXX"] = "/nowhere/g++"
    settings = {**TWO, "training.compile": True, "training.max_steps": 2}
    summary = millrace.finish("plain", **settings)
    assert summary["steps"] == 2
    assert summary["incidents"]["counts"] == {"trainer.uncompiled": 1}
    # Version 0 has values only if the trainer started slowly enough to report its times before the first step.
    steps = [step for step in read_steps(millrace.store("plain")) if step.policy_version]
    assert {step.policy_version: step.values["compiled"] for step in steps} == {1: 0, 2: 0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["training.parallel.tensor=3"], ["training.parallel.tensor is 3", "num_attention_heads is 4"]),
        (["training.device=cuda", "training.parallel.data=1000"], ["1000 trainer ranks = 1000 GPUs; host "]),
    ],
)
def test_a_layout_that_does_not_divide_heads_or_gpus_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, settings: list[str], expected: list[str]
) -> None:
    root = tmp_path / "runs"
    assert main(["run", str(PRESET), "--root", str(root), "--set", *settings]) == 2
    assert not root.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("millrace: ")
    assert [words for words in expected if words not in line] == []
