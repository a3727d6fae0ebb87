"""Files of a run damaged under it, or before a resume: it continues with the right counts, or names the file.

Each cell damages one file. Then the command ends with exit code 2 and a sentence that names the file, or the run goes
on and its ledger is that of its Arrow files, counted by pyarrow alone. No traceback, no other exit code, no silence.
With `-s`, each cell prints a row of the table of all: file, damage, when, exit code, sentence, ledger.
"""

import json
import os
import shutil
import signal
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
from support.damage.kinds import FindFile, at, newest, next_record, record
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
FILES: dict[str, FindFile] = {
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
    "block of prompts": newest("prompt_blocks/*.json"),
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
MORE_FILES: dict[str, FindFile] = {
    "next trajectory record": next_record(TRAJECTORIES),
    "next score record": next_record(SCORES),
    "next checkpoint record": next_record("checkpoints"),
    "next metrics record": next_record("streams/metrics/train-0"),
    "score's status": at("progress/score-0.json"),
    "shared memory": handover_file,
    "the run's folder": lambda run: run,
}
ENDLESS: dict[str, object] = {"training.max_steps": 100_000, "supervision.hang_seconds": 30.0}
SETTINGS: dict[str, object] = {
    **FROM_SCRATCH,
    "prompts.curriculum_window": 2,
    "training.max_steps": 100,
    "budget.max_steps": 3,
}


@pytest.fixture(scope="module")
def stored(module_millrace: Millrace) -> Path:
    """The folder of a run of two attempts, to be copied; one of another seed is next to it, as `other`."""
    for run_id, seed in (("run", 0), ("other", 1)):
        for flags in ((), ("--resume",)):
            module_millrace.finish(run_id, *flags, **SETTINGS, seed=seed)
    return module_millrace.root


def cells(listed: list[tuple[str, str]]) -> list[Any]:
    """All of them, for `make faults`; a few for `make test` too."""
    names = [" ".join(cell) for cell in listed]
    return [
        pytest.param(*cell, id=name, marks=() if name in IN_TEST_SLOW else pytest.mark.faults)
        for cell, name in zip(listed, names, strict=True)
    ]


def sentence(ended: Ended) -> str:
    """The last message of the command, in one line."""
    lines = ended.output.strip().splitlines()
    first = max((number for number, line in enumerate(lines) if line.startswith("millrace: ")), default=len(lines) - 1)
    return " ".join(lines[first:])


def check_end(ended: Ended, run: Path, damaged: Path) -> None:
    """Checks that the command ended well, or with exit code 2 and a message that names the damaged file."""
    log = "".join(file.read_text(errors="replace") for file in (run / "logs").glob("*.log"))
    assert "Traceback" not in ended.output + log, ended.output + log
    if ended.code == 2:
        output = ended.output.replace("\n", "")
        assert "millrace: " in output
        path = damaged.relative_to(run)
        # A log that ends early, or a record of another run, shows at the neighbouring records.
        folder = path.parents[2 if "trajectories" in path.parts else 1] if path.parent.name == "log" else path
        assert path.as_posix() in output or folder.as_posix() in output, ended.output
        return
    assert ended.code == 0, ended.output


def check_counts(run: Path, summary: dict[str, Any]) -> str:
    """Compares the counts, and returns them in words."""
    assert_balanced(summary)
    counts = recount(run)
    assert counts.twice == 0
    assert summary["ledger"]["generated"]["rollouts"] == counts.generated
    if counts.outcomes is None:
        return f"generated {counts.generated}"
    assert summary["ledger"]["trained"]["rollouts"] == counts.outcomes["trained"]
    return f"generated {counts.generated}, trained {counts.outcomes['trained']}"


@pytest.mark.parametrize(("file", "how"), cells(BEFORE_RESUME))
def test_damage_before_a_resume_is_named_or_costs_what_it_damaged(
    file: str, how: str, stored: Path, millrace: Millrace
) -> None:
    if how == "forbidden" and os.geteuid() == 0:
        millrace.prefix = WITHOUT_ROOTS_RIGHTS
    shutil.copytree(stored, millrace.root)
    run = millrace.root / "run"
    damaged = FILES[file](run)
    kinds.BEFORE_RESUME[how](damaged)
    ended = millrace.run(*millrace.campaign("run", "--resume", **{**SETTINGS, "budget.max_steps": 2}))
    print(f"| {file} | {how} | before a resume | {ended.code} | {sentence(ended)}", end=" | ")
    check_end(ended, run, damaged)
    print(check_counts(run, millrace.summary("run")) if ended.code == 0 else "–", end=" |\n")


def step_of(millrace: Millrace) -> int:
    step = millrace.status_record("run", "train-0").get("policy_version", -1)
    # A cell may have put another JSON in its place.
    return step if isinstance(step, int) else -1


def counted_or_named(millrace: Millrace, damaged: Path) -> str:
    """The counts of `millrace status`, or its message if it can't count without the damaged file."""
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
        kinds.WHILE_RUNNING[how](damaged)
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
