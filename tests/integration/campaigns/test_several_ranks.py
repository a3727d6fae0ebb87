"""Campaigns whose trainer is spread over ranks: to everything else it is one stage, whatever becomes of a rank."""

import json
import signal
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, Millrace, assert_balanced, send, stages_of, wait_until
from support.stages.failpoints import Failpoints

from flows.cli.main import main
from storage.checkpoints import read_latest
from storage.failpoints import FIRED, SPECS
from storage.stores.factory import open_store

pytestmark = pytest.mark.campaign

ROLLOUTS_PER_STEP = 16 * 8
TWO = {"training.parallel.data": 2}


@pytest.mark.extended
def test_a_campaign_on_two_ranks_outlives_one_of_them_drains_and_goes_on_with_one(
    millrace: Millrace, tmp_path: Path
) -> None:
    armed = Failpoints(tmp_path / "fired", "train-0.1 train.mid_step 3 kill")
    environment = armed.environment()
    millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
    process = millrace.start(*millrace.campaign("spread", **TWO, **{"training.max_steps": 100_000}))
    wait_until(lambda: not armed.missed(), "the second rank to be killed")
    wait_until(lambda: millrace.status_record("spread", "train-0").get("policy_version", 0) >= 5, "step 5")
    ended = send(process, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert stages_of(millrace.root / "spread") == []
    stopped = millrace.status("spread")
    assert_balanced(stopped)
    checkpoint = read_latest(open_store(str(millrace.root / "spread")))
    assert checkpoint is not None
    assert checkpoint.step == stopped["steps"], "what was trained is checkpointed"
    assert "model-1-of-2.safetensors" in checkpoint.files
    assert checkpoint.incarnation == 1, "the trainer was started again once"

    last = stopped["steps"] + 2
    ended = millrace.run(*millrace.campaign("spread", "--resume", **{"training.max_steps": last}))
    assert ended.code == 0, ended.output
    summary = millrace.summary("spread")
    assert (summary["state"], summary["steps"]) == ("finished", last)
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == last * ROLLOUTS_PER_STEP


@pytest.mark.extended
def test_a_campaign_on_two_ranks_comes_to_its_end_and_its_verification_on_one_says_what_differs(
    millrace: Millrace,
) -> None:
    ended = millrace.run(*millrace.campaign("whole", **TWO, **{"training.max_steps": 3}))
    assert ended.code == 0, ended.output
    summary = millrace.summary("whole")
    assert summary["steps"] == 3
    assert_balanced(summary)
    assert stages_of(millrace.root / "whole") == []
    replay = ["replay", str(millrace.root / "whole"), "--root", str(millrace.root)]
    # Where a gradient is 0 but for rounding, AdamW takes a whole step all the same, either way.
    ended = millrace.run(*replay, "--run-id", "near", "--verify", "--tolerance", "0.01")
    assert ended.code == 0, ended.output
    verdict = json.loads((millrace.root / "near" / "replay" / "verdict.json").read_text())
    assert verdict["unlike"] == {"training.parallel.data": [2, 1]}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["training.parallel.tensor=3"], ["training.parallel.tensor is 3", "num_attention_heads is 4"]),
        (["training.device=cuda", "training.parallel.data=1000"], ["training.parallel.data is 1000", "GPUs"]),
    ],
)
def test_a_layout_that_does_not_divide_heads_or_gpus_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, settings: list[str], expected: list[str]
) -> None:
    root = tmp_path / "runs"
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["run", str(PRESET), "--root", str(root), *flags]) == 2
    assert not root.exists()
    said = capsys.readouterr().err
    assert said.startswith("millrace: ")
    assert said.count("\n") == 1
    for words in expected:
        assert words in said
