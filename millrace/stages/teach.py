"""The teach stage: trajectories in, a teacher's log-probability of each of their response tokens out, row by row
(`millrace.stages.annotate`).

A row whose source has another teacher, or none, is `elsewhere` in this stream. A response with a token that the teacher
does not know is an error, and is dropped as such.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs.stored import AnnotationKind
from configs.training import TeacherConfig
from millrace.errors import InputError
from millrace.models.loading import load_model
from millrace.models.start_folder import start_folder
from millrace.preflight.teacher import START, check_same_tokenizer
from millrace.rewards.rows import ELSEWHERE
from millrace.rollouts.arrow import list_slices
from millrace.runs.provenance import content_hash
from millrace.runs.record import read_attempt
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from millrace.stages.annotate import annotate
from millrace.training.batch import Sample
from millrace.training.teacher import TaughtTokens, Teacher
from storage.schema import TEACHER
from storage.streams.record import Record
from storage.streams.stream import Part


def main(stage: Stage) -> None:
    """Teaches until asked to drain."""
    name, config = stage.config.teacher_of(stage.replica)
    with stage.loading():
        teacher, version = _load(stage, name, config)
    teacher.on_progress(stage.beat)
    annotator = TeacherAnnotator(stage, teacher, version)
    stage.mark_ready(f"teacher {stage.replica} ready: {name}, {version}")
    num_rows = annotate(stage, annotator)
    stage.log(f"teacher {stage.replica} drained after {num_rows} rows")


def _load(stage: Stage, name: str, config: TeacherConfig) -> tuple[Teacher, str]:
    """The teacher and its version. Raises InputError if it is not the one that the attempt began with."""
    start = start_folder(stage.store, stage.config.model.path, stage.arguments.handover)
    folder, key = start if config.path == START else Path(config.path).expanduser(), f"teachers.{name}.path"
    version = content_hash(folder)
    recorded = read_attempt(stage.store, stage.arguments.attempt).inputs.get(f"{key} {config.path}", version)
    if version != recorded:
        raise InputError(f"{config.path}, which was {recorded} and is {version}", key=key)
    teacher = Teacher(
        load_model(folder, stage.config.compute_dtype),
        num_ids=check_same_tokenizer(name, folder, start),
        max_tokens=stage.config.training.max_tokens_per_microbatch,
        device=config.device,
    )
    return teacher, version


class TeacherAnnotator:
    """Computes the rows of the sources that this replica's teacher has."""

    kind: AnnotationKind = "teachers"

    def __init__(self, stage: Stage, teacher: Teacher, version: str) -> None:
        pools = stage.config.annotators
        pool, _ = pools.annotator(self.kind, stage.replica)
        self.top_k = {
            name: config.training.distillation.top_k or 0
            for name, config in stage.config.by_source().items()
            if pools.of_source(self.kind, name) == pool
        }
        """Source → number of likeliest tokens stored for each response token, 0 for none."""
        self.teacher, self.version = teacher, version

    def submit(self, generator: int, part: Part) -> "UntaughtRows":
        """Leaves all work to `collect`."""
        return UntaughtRows(annotator=self, trajectories=part.table)

    def unread_rows(self, record: Record, error: str) -> pa.Table:
        """Returns rows that hold the error."""
        row_ids = range(record.first_row_id, record.first_row_id + record.rows)
        return pa.Table.from_pylist([_row(row_id, self.version, error=error) for row_id in row_ids], schema=TEACHER)

    def has_room(self) -> bool:
        """A part has to be committed before the next one: the teacher is busy with one at a time."""
        return False

    def on_commit(self, part: Part, rows: pa.Table) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True, kw_only=True)
class UntaughtRows:
    """The rows of a part."""

    annotator: TeacherAnnotator
    trajectories: pa.Table
    is_ready: bool = True

    def collect(self) -> pa.Table:
        """Rows of `TEACHER`, one per row of the part and in its order."""
        teacher, version, began = self.annotator.teacher, self.annotator.version, time.monotonic()
        top_k, sources = self.annotator.top_k, self.trajectories["source"].to_pylist()
        samples = samples_of_rows(self.trajectories)
        served = [i for i, source in enumerate(sources) if source in top_k]
        unknown = {i: teacher.unknown_id(samples[i]) for i in served}
        known = [i for i in served if unknown[i] is None]
        taught = dict(zip(known, teacher.teach([samples[i] for i in known], max(top_k.values())), strict=True))
        seconds = (time.monotonic() - began) / max(1, sum(len(tokens.logprobs) for tokens in taught.values()))
        rows = []
        for i, row_id in enumerate(self.trajectories["row_id"].to_pylist()):
            if i not in unknown:
                rows.append(_row(row_id, ""))
            elif i not in taught:
                rows.append(_row(row_id, version, error=f"token {unknown[i]} is beyond the teacher's vocabulary"))
            elif not np.isfinite(taught[i].logprobs).all():
                rows.append(_row(row_id, version, error="a log-probability of the teacher is not finite"))
            else:
                rows.append(_row(row_id, version, taught=taught[i], top_k=top_k[sources[i]], seconds=seconds))
        return pa.Table.from_pylist(rows, schema=TEACHER)


def _row(
    row_id: int,
    version: str,
    *,
    taught: TaughtTokens | None = None,
    top_k: int = 0,
    error: str | None = None,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """A row of `TEACHER`; `seconds` are those per token."""
    return {
        "row_id": row_id,
        "teacher_logprobs": [] if taught is None else taught.logprobs,
        "teacher_top_tokens": [] if taught is None else taught.top_tokens[:, :top_k].ravel(),
        "teacher_top_logprobs": [] if taught is None else taught.top_logprobs[:, :top_k].ravel(),
        "status": "ok" if taught is not None else ELSEWHERE if error is None else "error",
        "error": error,
        "teacher_version": version,
        "seconds": 0.0 if taught is None else seconds * len(taught.logprobs),
    }


def samples_of_rows(trajectories: pa.Table) -> list[Sample]:
    """A sample per row of `TRAJECTORY`, without its advantage."""
    names = ("prompt_tokens", "response_tokens", "rollout_logprobs", "loss_mask", "kept_tokens", "kept_counts")
    lists = [list_slices(trajectories[name]) for name in names]
    temperatures, longest = (trajectories[name].to_pylist() for name in ("temperature", "max_new_tokens"))
    return [
        Sample(
            **dict(zip(names, values, strict=True)),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            advantage=0.0,
            staleness=0,
        )
        for *values, temperature, max_new_tokens in zip(*lists, temperatures, longest, strict=True)
    ]


if __name__ == "__main__":
    run_stage("teach", main)
