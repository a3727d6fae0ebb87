"""Replays of a real asynchronous campaign, killed and resumed twice on its way, by the command that a person types."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from support.campaigns.campaigns import Millrace, await_end, send, stages_of

from flows.cli.main import main
from millrace.replay.source_run import SourceRun
from storage.stores.factory import open_store

pytestmark = pytest.mark.campaign

STEPS = 60
ASYNC = {"training.max_steps": STEPS, "training.checkpoint_every": 7, "staleness.max_staleness": 2}


@pytest.fixture(scope="module")
def stored(module_millrace: Millrace) -> Path:
    """The campaign: its controller and all its stages are killed at step 15 and at step 35."""
    for flags, step in (((), 15), (("--resume",), 35)):
        process = module_millrace.start(*module_millrace.campaign("hard", *flags, **ASYNC))
        module_millrace.wait_for_version("hard", step)
        # The stages first: none of them may notice that its controller is gone, and drain.
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.kill()
        process.communicate()
    module_millrace.finish("hard", "--resume", **ASYNC)
    return module_millrace.root / "hard"


def replay(millrace: Millrace, source: Path, run_id: str, *flags: str) -> str:
    """Returns the command's output."""
    return millrace.run(
        "replay", str(source), "--root", str(millrace.root), "--run-id", run_id, *flags
    ).expect_success()


def read_result(millrace: Millrace, run_id: str, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((millrace.root / run_id / "replay" / f"{name}.json").read_text())
    return values


def source_of(run: Path) -> SourceRun:
    return SourceRun(open_store(str(run)))


def weights(run: Path) -> dict[int, str]:
    """The checksum of the weights of every checkpoint that was not rolled back, by version."""
    checkpoints = source_of(run).checkpoints
    return {version: checkpoint.files["model.safetensors"].checksum for version, checkpoint in checkpoints.items()}


def replayed_weights(run: Path) -> dict[int, str]:
    """`weights` without the checkpoints that only an evaluation was due for: a replay that trains has none."""
    return {version: checksum for version, checksum in weights(run).items() if version not in (20, 40)}


def test_every_checkpoint_of_a_run_killed_twice_is_reproduced_bit_for_bit(millrace: Millrace, stored: Path) -> None:
    incarnations = np.unique(source_of(stored).groups["incarnation"].to_numpy())
    assert len(incarnations) == 3, "it was rolled back twice"
    before = {file: file.read_bytes() for file in stored.rglob("*") if file.is_file()}
    assert "the same bit for bit" in replay(millrace, stored, "verified", "--verify")
    verdict = read_result(millrace, "verified", "verdict")
    assert verdict["difference"] is None
    assert verdict["steps"] == STEPS
    assert verdict["steps_without_logprobs"] == 0
    # Those of checkpoint_every, of evaluation.every, and the last.
    expected = [7, 14, 20, 21, 28, 35, 40, 42, 49, 56, 60]
    assert [checkpoint["step"] for checkpoint in verdict["checkpoints"]] == expected
    assert all(checkpoint["hash"] == checkpoint["stored_hash"] for checkpoint in verdict["checkpoints"])
    assert {file: file.read_bytes() for file in stored.rglob("*") if file.is_file()} == before, "it only reads"


@pytest.mark.extended
def test_training_in_stored_order_from_the_same_start_gives_the_same_policy(millrace: Millrace, stored: Path) -> None:
    replay(millrace, stored, "again", "--train")
    original, replayed = read_result(millrace, "again", "trained")["runs"]
    assert replayed["accuracy"] == original["accuracy"]
    assert replayed["steps"] == original["steps"] == STEPS
    assert weights(millrace.root / "again") == replayed_weights(stored)
    millrace.run("fsck", str(millrace.root / "again")).expect_success()
    millrace.run("diff", str(stored), str(millrace.root / "again")).expect_success()


@pytest.mark.extended
def test_a_replay_trains_on_the_chosen_groups_and_nothing_else(millrace: Millrace, stored: Path) -> None:
    flags = ["--train", "--set", "training.loss=cispo", "training.groups_per_step=8", "--order", "shuffled"]
    chosen = ["--from-step", "10", "--to-step", "20", "--where", "group_id % 2 = 0"]
    replay(millrace, stored, "some", *flags, *chosen)
    source, made = source_of(stored), source_of(millrace.root / "some")
    of_source = {row["first_row_id"]: row for row in source.groups.to_pylist()}
    taken = [of_source[first] for first in made.groups["first_row_id"].to_pylist()]
    assert taken, "nothing was trained"
    assert all(10 <= row["step"] <= 20 for row in taken)
    assert all(row["group_id"] % 2 == 0 for row in taken)
    assert len({row["first_row_id"] for row in taken}) == len(taken)
    assert [row["step"] for row in taken] != sorted(row["step"] for row in taken), "shuffled"
    assert {len(made.batch(step)) for step in made.steps} == {8}


@pytest.mark.extended
def test_several_runs_are_trained_on_one_after_the_other(millrace: Millrace, stored: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(stored, tmp_path / "other"))
    flags = ["--train", "--to-step", "3", "--root", str(millrace.root)]
    millrace.run("replay", str(stored), str(other), "--run-id", "mixed", *flags).expect_success()
    made, original = source_of(millrace.root / "mixed"), source_of(stored)
    assert made.steps == [1, 2, 3, 4, 5, 6]
    first_rows = original.groups["first_row_id"].to_pylist()
    expected = [first_rows[row] for step in (1, 2, 3) for row in original.batch(step).tolist()]
    assert made.groups["first_row_id"].to_pylist() == expected * 2, "both hold the same groups"


@pytest.mark.extended
def test_a_replay_interrupted_while_it_trains_stores_every_finished_step(millrace: Millrace, stored: Path) -> None:
    settings = ["--set", "training.checkpoint_every=1000"]
    arguments = ["replay", str(stored), "--train", "--root", str(millrace.root), "--run-id", "cut", *settings]
    process = millrace.start(*arguments)
    millrace.wait_for_version("cut", 5, every=0.01)
    ended = send(process, signal.SIGINT)
    assert ended.code == 130, ended.output
    assert "Traceback" not in ended.output
    assert f"what was trained is in {millrace.root}/cut" in ended.output
    assert stages_of(millrace.root / "cut") == []
    made = source_of(millrace.root / "cut")
    assert 5 <= made.steps[-1] < STEPS, "it was interrupted while it trained"
    assert max(made.checkpoints) == made.steps[-1]


@pytest.mark.extended
def test_a_broken_reward_shows_its_flips_and_the_fixed_one_recovers(millrace: Millrace, stored: Path) -> None:
    broken = ["--set", 'scoring.answer_pattern="^(\\\\d)\\\\d*"']
    output = replay(millrace, stored, "broken", "--rescore", "exact_match", *broken, "--train")
    flips = read_result(millrace, "broken", "rescored")["total"]
    assert flips["fell"] > 0
    assert flips["rose"] == 0
    assert flips["agreed"] == flips["rows"] - flips["fell"]
    assert flips["shift"] == pytest.approx(-flips["fell"] / flips["rows"])
    changed = pq.read_table(millrace.root / "broken" / "replay" / "changed.parquet")
    assert changed.num_rows == flips["fell"]
    assert "fell" in output
    assert weights(millrace.root / "broken")[STEPS] != weights(stored)[STEPS]
    replay(millrace, stored, "fixed", "--rescore", "exact_match", "--train")
    assert read_result(millrace, "fixed", "rescored")["total"]["agreement"] == 1.0
    assert weights(millrace.root / "fixed") == replayed_weights(stored), "the same rewards, the same policy"


@pytest.mark.extended
def test_losses_stand_side_by_side_on_the_same_batches(millrace: Millrace, stored: Path) -> None:
    output = replay(millrace, stored, "compared", "--compare", "aipo,reinforce,ppo_clip,cispo", "--to-step", "12")
    assert read_result(millrace, "compared", "comparison")["logprob_error"] == 0, "the weights are the run's own"
    table = pq.read_table(millrace.root / "compared" / "replay" / "comparison.parquet")
    assert table.num_rows == 12 * 4
    first = [row for row in table.to_pylist() if row["step"] == 1]
    # Step 1 is on-policy: every ratio is 1 but for rounding, and the losses agree.
    assert first[0]["staleness_mean"] == 0
    assert all(row["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-5) for row in first)
    assert all(row["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-5) for row in first)
    # Without a reward in the first batch there is no gradient, and no direction to compare.
    cosine = None if first[0]["grad_norm"] == 0 else pytest.approx(1.0, abs=1e-6)
    assert all(row["cosine_aipo"] == cosine for row in first)
    assert "gradient norm before clipping" in output
    assert "gradient norm before clipping" in (millrace.root / "compared" / "replay" / "report.md").read_text()


@pytest.mark.extended
def test_a_replay_that_is_killed_goes_on_at_its_last_checkpoint(millrace: Millrace, stored: Path) -> None:
    process = millrace.start("replay", str(stored), "--train", "--root", str(millrace.root), "--run-id", "killed")
    millrace.wait_for_version("killed", 10, every=0.01)
    psutil.Process(millrace.status_record("killed", "train-0")["pid"]).send_signal(signal.SIGKILL)
    await_end(process, 300).expect_success()
    assert weights(millrace.root / "killed") == replayed_weights(stored)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--train", "--from-step", "900"],
        ["--train", "--where", "colour = 1"],
        ["--train", "--set", "training.groups_per_step=4096"],
        ["--train", "--set", "training.loss=magic"],
        ["--compare", "aipo,magic"],
        ["--rescore", "magic"],
        ["--rescore", "exact_match", "--verify"],
        ["--verify", "--set", "seed=3"],
        ["--verify", "--order", "shuffled"],
        ["--train", "--start-step", "8"],
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stored: Path, flags: list[str]
) -> None:
    root = tmp_path / "runs"
    assert main(["replay", str(stored), "--root", str(root), "--run-id", "mistaken", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (root / "mistaken").exists()
