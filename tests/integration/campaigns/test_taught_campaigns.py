"""Campaigns with two teachers and a source without one, whose processes are killed."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, start_model
from support.streams.rows import read_rows

from millrace.models.loading import load_model
from millrace.replay.verify import verify
from millrace.runs.history import read_steps
from millrace.runs.record import latest_attempt
from millrace.stages.teach import samples_of_rows
from millrace.training.teacher import Teacher
from storage import layout
from storage.schema import TEACHER, TRAJECTORY
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign

STEPS = 6
SOURCES = {
    "sums": {"training": {"distillation": {"teacher": "expert", "reward_coefficient": 0.0, "top_k": 4}}},
    "digits": {"prompts": {"digits": 1}, "training": {"distillation": {"teacher": "reference"}}},
    "plain": {},
}
KILLS = (
    "teach-0 teach.before_commit 3 kill",
    "teach-1 put.mid:streams/teachers/*/seg/* 5 kill",
    "teach-1 teach.before_commit 2 kill",
    "train-0 train.mid_step 4 kill",
)


def make_expert(folder: Path) -> None:
    """The start model with other weights."""
    shutil.copytree(start_model(), folder)
    random, file = torch.Generator().manual_seed(0), folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: each + 0.1 * torch.randn(each.shape, generator=random) for name, each in tensors.items()}, file)


def test_killed_teachers_annotate_each_row_once_and_a_replay_needs_none(millrace: Millrace, tmp_path: Path) -> None:
    expert = tmp_path / "expert"
    make_expert(expert)
    teachers = {"reference": {"path": "start"}, "expert": {"path": str(expert)}}
    settings = {"training.max_steps": STEPS, "sources": SOURCES, "teachers": teachers}
    armed = millrace.arm(tmp_path / "fired", *KILLS)
    process = millrace.start(*millrace.campaign("taught", **settings))
    millrace.wait_for_version("taught", 1, 300, every=0.01)
    os.kill(millrace.status_record("taught", "teach-0")["pid"], signal.SIGKILL)
    await_end(process, 400).expect_success()
    assert armed.missed() == []

    summary, store = millrace.summary("taught"), millrace.store("taught")
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert_balanced(summary)
    millrace.run("fsck", store.url).expect_success()
    assert {f"teachers.expert.path {expert}"} < latest_attempt(store).inputs.keys()

    rows = {name: read_rows(store, layout.annotations(f"teachers/{name}", 0, 0, 1), TEACHER) for name in teachers}
    model = Teacher(load_model(expert, "float32"), num_ids=100, max_tokens=4096)
    for part in iter(StreamReader(store, layout.trajectories(0), TRAJECTORY).next, None):
        by_row = zip(part.table["row_id"].to_pylist(), part.table["source"].to_pylist(), strict=True)
        for (row_id, source), taught in zip(by_row, model.teach(samples_of_rows(part.table), 4), strict=True):
            if row_id >= min(map(len, rows.values())):
                continue
            statuses = {name: annotated[row_id]["status"] for name, annotated in rows.items()}
            assert statuses == {
                "expert": "ok" if source == "sums" else "elsewhere",
                "reference": "ok" if source == "digits" else "elsewhere",
            }
            if source == "sums":
                stored = rows["expert"][row_id]
                assert np.allclose(stored["teacher_logprobs"], taught.logprobs, atol=1e-5)
                assert np.allclose(stored["teacher_top_logprobs"], taught.top_logprobs.ravel(), atol=1e-5)
    assert all([row["row_id"] for row in annotated] == [*range(len(annotated))] for annotated in rows.values())
    measured = [step.values for step in read_steps(store) if "loss" in step.values]
    assert all(values["kl_to_teacher"] for values in measured)
    assert all(values["forward_kl_to_teacher"] > 0 for values in measured)

    shutil.rmtree(expert)
    verdict = verify(store)
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)
