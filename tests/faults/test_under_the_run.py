"""Files of a run damaged under it, or before a resume: it goes on with the right counts, or says what it found.

Each cell damages one file. Then the command ends with exit code 2 and a sentence that names the file, or the run goes
on and its ledger is that of its Arrow files, counted by pyarrow alone. No traceback, no other exit code, no silence.
With `-s`, each cell prints a row of the table of all: file, damage, when, exit code, sentence, ledger.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import (
    FROM_SCRATCH,
    WITHOUT_ROOTS_RIGHTS,
    Ended,
    Millrace,
    assert_balanced,
    await_end,
    send,
    wait_until,
)
from support.damage import kinds
from support.damage.kinds import at, newest, next_record, record
from support.damage.recount import recount

from flows.campaign.attempt import handover_prefix
from storage.stores.memory import memory_folder

pytestmark = pytest.mark.campaign
IN_TEST_SLOW = ("shared memory cut off",)
"""Cells that `make test` runs too; tests/integration/failures/test_damage.py has more before a resume."""


def handover_file(run: Path) -> Path:
    """The file in shared memory in which the weights of a running attempt pass."""
    (folder,) = memory_folder().glob(f"{handover_prefix(str(run))}*")
    return folder / "handover"


TRAJECTORIES, SCORES = "streams/trajectories/0", "streams/scores/exact_match/0/0-of-1"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": kinds.deleted,
    "truncated": kinds.truncated,
    "garbage": kinds.garbage,
    "a folder": kinds.directory,
    "a link out": kinds.link_out,
    "of another run": kinds.of_another_run,
    "forbidden": kinds.forbidden,
}
FILES: dict[str, Callable[[Path], Path]] = {
    "run.json": at("run.json"),
    "attempt record": at("attempts/0001.json"),
    "attempt's end": at("attempts/0001.ended"),
    "first trajectory record": at(f"{TRAJECTORIES}/log/000000000000.json"),
    "trajectory record": record(TRAJECTORIES, back=1),
    "newest trajectory record": record(TRAJECTORIES, back=0),
    "trajectory part": newest(f"{TRAJECTORIES}/seg/*"),
    "unfinished record": record("streams/unfinished/0", back=0),
    "unfinished part": newest("streams/unfinished/0/seg/*"),
    "score record": record(SCORES, back=2),
    "newest score record": record(SCORES, back=0),
    "score part": newest(f"{SCORES}/seg/*"),
    "metrics record": record("streams/metrics/train-0", back=1),
    "metrics part": newest("streams/metrics/sync_weights-0/seg/*"),
    "consumed record": record("streams/consumed", back=1),
    "consumed part": newest("streams/consumed/seg/*"),
    "log of logprobs": record("streams/trainer_logprobs", back=0),
    "checkpoint record": record("checkpoints", back=0),
    "earlier checkpoint record": record("checkpoints", back=2),
    "checkpoint weights": newest("checkpoints/data/*/model.safetensors"),
    "promoted record": record("weights/promoted", back=0),
    "trainer's status": at("progress/train-0.json"),
    "generator's status": at("progress/generate-0.json"),
    "evaluation": newest("evaluations/*.json"),
    "start model's config": at("start/config.json"),
    "start model's weights": at("start/model.safetensors"),
    "start model's list": at("start.json"),
    "start model's hashes": at("start_hashes.json"),
    "curriculum block": newest("curriculum/*.json"),
    "summary": at("summary.json"),
}
IN_TURN = ("truncated", "a folder", "a link out", "of another run", "forbidden")
BEFORE_RESUME = [
    (file, how) for number, file in enumerate(FILES) for how in ("deleted", "garbage", IN_TURN[number % len(IN_TURN)])
]
WHILE_RUNNING: list[tuple[str, str]] = [
    ("run.json", "deleted"),
    ("run.json", "garbage"),
    ("run.json", "truncated"),
    ("next trajectory record", "put in its place"),
    ("next score record", "put in its place"),
    ("next checkpoint record", "put in its place"),
    ("next metrics record", "put in its place"),
    ("trajectory record", "deleted"),
    ("score record", "deleted"),
    ("score record", "garbage"),
    ("checkpoint record", "deleted"),
    ("checkpoint weights", "garbage"),
    ("score part", "deleted"),
    ("consumed part", "truncated"),
    ("trainer's status", "deleted"),
    ("trainer's status", "JSON of another kind"),
    ("generator's status", "JSON of another kind"),
    ("generator's status", "a folder"),
    ("score's status", "JSON of another kind"),
    ("shared memory", "deleted"),
    ("shared memory", "cut off"),
    ("shared memory", "its header overwritten"),
    ("shared memory", "a bit flipped"),
    ("the run's folder", "deleted"),
    ("the run's folder", "moved away"),
]
MORE_FILES: dict[str, Callable[[Path], Path]] = {
    "next trajectory record": next_record(TRAJECTORIES),
    "next score record": next_record(SCORES),
    "next checkpoint record": next_record("checkpoints"),
    "next metrics record": next_record("streams/metrics/train-0"),
    "score's status": at("progress/score-0.json"),
    "shared memory": handover_file,
    "the run's folder": lambda run: run,
}
MORE_DAMAGE: dict[str, Callable[[Path], object]] = {
    "put in its place": Path.mkdir,
    "JSON of another kind": kinds.other_json,
    "cut off": lambda path: os.truncate(path, 100),
    "its header overwritten": kinds.overwritten,
    "a bit flipped": kinds.flipped,
    "moved away": lambda path: path.rename(path.with_name("moved")),
}
ENDLESS: dict[str, object] = {"training.max_steps": 100_000, "supervision.hang_seconds": 30.0}
SETTINGS: dict[str, object] = {
    **FROM_SCRATCH,
    "prompts.curriculum_window": 2,
    "training.max_steps": 100,
    "budget.max_steps": 3,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], prefect_api: str) -> Path:
    """The folder of a run of two attempts, to be copied; one of another seed is beside it, as `other`."""
    root = tmp_path_factory.mktemp("stored")
    millrace = Millrace(root, {**environment, "PREFECT_API_URL": prefect_api})
    for run_id, seed in (("run", 0), ("other", 1)):
        for flags in ((), ("--resume",)):
            ended = millrace.run(*millrace.campaign(run_id, *flags, **SETTINGS, seed=seed))
            assert ended.code == 0, ended.output
    return root


def cells(listed: list[tuple[str, str]]) -> list[Any]:
    """All of them, for `make faults`; a few for `make test` too."""
    names = [" ".join(cell) for cell in listed]
    return [
        pytest.param(*cell, id=name, marks=() if name in IN_TEST_SLOW else pytest.mark.faults)
        for cell, name in zip(listed, names, strict=True)
    ]


def sentence(ended: Ended) -> str:
    """What the command said at its end, in one line."""
    lines = ended.output.strip().splitlines()
    first = max((number for number, line in enumerate(lines) if line.startswith("millrace: ")), default=len(lines) - 1)
    return " ".join(lines[first:])


def check_end(ended: Ended, run: Path, damaged: Path) -> None:
    """The rule of this module."""
    log = "".join(file.read_text(errors="replace") for file in (run / "logs").glob("*.log"))
    assert "Traceback" not in ended.output + log, ended.output + log
    if ended.code == 2:
        said = ended.output.replace("\n", "")
        assert "millrace: " in said
        path = damaged.relative_to(run)
        # A log that ends early, or a record of another run, shows at the records beside it.
        folder = path.parents[2 if "trajectories" in path.parts else 1] if path.parent.name == "log" else path
        assert path.as_posix() in said or folder.as_posix() in said, ended.output
        return
    assert ended.code == 0, ended.output


def check_counts(run: Path, summary: dict[str, Any]) -> str:
    """Returns what was counted, in words."""
    assert_balanced(summary)
    found = recount(run)
    assert found.twice == 0
    assert summary["ledger"]["generated"]["rollouts"] == found.generated
    if found.outcomes is None:
        return f"generated {found.generated}"
    assert summary["ledger"]["trained"]["rollouts"] == found.outcomes["trained"]
    return f"generated {found.generated}, trained {found.outcomes['trained']}"


@pytest.mark.parametrize(("file", "how"), cells(BEFORE_RESUME))
def test_damage_before_a_resume_is_named_or_costs_what_it_damaged(
    file: str, how: str, stored: Path, millrace: Millrace
) -> None:
    if how == "forbidden" and os.geteuid() == 0:
        millrace.prefix = WITHOUT_ROOTS_RIGHTS
    shutil.copytree(stored, millrace.root)
    run = millrace.root / "run"
    damaged = FILES[file](run)
    DAMAGE[how](damaged)
    ended = millrace.run(*millrace.campaign("run", "--resume", **{**SETTINGS, "budget.max_steps": 2}))
    print(f"| {file} | {how} | before a resume | {ended.code} | {sentence(ended)}", end=" | ")
    check_end(ended, run, damaged)
    print(check_counts(run, millrace.summary("run")) if ended.code == 0 else "–", end=" |\n")


def step_of(millrace: Millrace) -> int:
    step = millrace.status_record("run", "train-0").get("policy_version", -1)
    # The record may be what a cell put in its place.
    return step if isinstance(step, int) else -1


def counted_or_named(millrace: Millrace, damaged: Path) -> str:
    """What `millrace status` counts, in words. Its sentence, if it can't count without the damaged file."""
    status = millrace.run("status", str(millrace.root / "run"), "--json")
    if status.code == 0:
        return check_counts(millrace.root / "run", json.loads(status.output))
    assert status.code == 2, status.output
    assert damaged.name in status.output.replace("\n", ""), status.output
    return sentence(status)


@pytest.mark.parametrize(("file", "how"), cells(WHILE_RUNNING))
def test_damage_under_a_running_campaign_is_named_or_survived(file: str, how: str, millrace: Millrace) -> None:
    run = millrace.root / "run"
    process = millrace.start(*millrace.campaign("run", **ENDLESS))
    wait_until(lambda: step_of(millrace) >= 4 or process.poll() is not None, "the first steps")
    step, damaged = step_of(millrace), {**FILES, **MORE_FILES}[file](run)
    try:
        {**DAMAGE, **MORE_DAMAGE}[how](damaged)
    except FileExistsError:
        pytest.skip("the next record was faster")
    # Long enough for a stall to be noticed, and its cause to be named.
    wait_until(lambda: process.poll() is not None or step_of(millrace) >= step + 8, f"an end, or steps beyond {step}")
    survives = process.poll() is None
    ended = send(process, signal.SIGTERM) if survives else await_end(process, 60)
    print(f"| {file} | {how} | while running | {ended.code} | {sentence(ended)}", end=" | ")
    assert "Traceback" not in ended.output, ended.output
    if survives:
        assert ended.code in (143, 2), ended.output
    else:
        assert ended.code == 2, ended.output
        assert "millrace: " in ended.output
        assert damaged.name in ended.output.replace("\n", ""), ended.output
    print("–" if ended.code == 2 else counted_or_named(millrace, damaged), end=" |\n")
