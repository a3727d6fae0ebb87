"""The score stage: trajectories in, one score a trajectory out, in streams that zip with theirs row by row.

    ║ trajectories/0 ║ ─► part k ─┐                                  ┌─► ║ scores/<reward>/0/s-of-S ║ part k div S
    ║ trajectories/1 ║ ─► part k ─┴─► k mod S = s? ─► score a row ───┴─► ║ scores/<reward>/1/s-of-S ║ part k div S

Consumes: every generator's trajectories. Waits for: the next part that is its share. Produces: one part of scores a
part of trajectories. Its own stream says where to resume: j parts in it mean that trajectory part j·S + s is next.
A part that can't be read gets a score a row all the same, each an error: so the streams stay aligned.
In a replay the trajectories are those of the stored run, and the stage ends with the last of them.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from millrace.model import load_tokenizer, start_folder
from millrace.replay.spec import read_spec
from millrace.rewards.base import failed
from millrace.rewards.scorer import Scorer
from millrace.rewards.wire import Judged
from millrace.stages.process import Stage, run_stage
from millrace.stages.scoring import make_scorer
from millrace.trajectories import answers, environment_error_of, prompt_of
from storage import layout
from storage.errors import PartCorrupt
from storage.factory import open_store
from storage.failpoints import failpoint
from storage.record import Record
from storage.schema import SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import Part, StreamReader, StreamWriter


def main(stage: Stage) -> None:
    """Scores until asked to drain; in a replay, what the stored run holds."""
    with ExitStack() as stack:
        with stage.loading():
            folder = start_folder(stage.store, stage.config.model.path, stage.arguments.handover)
            tokenizer = load_tokenizer(folder)
            scorer = stack.enter_context(make_scorer(stage.config))
        _score_all(stage, scorer, tokenizer)


def _score_all(stage: Stage, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
    spec = read_spec(stage.store)
    source = stage.store if spec is None else open_store(spec.sources[0].url)
    lanes = [_Lane(stage, generator, source) for generator in range(stage.config.generation.replicas)]
    stage.ready(f"scorer {stage.replica} ready with reward {scorer.name} {scorer.version}")

    def next_part() -> bool:
        return any(lane.look() for lane in lanes)

    def more() -> bool:
        if spec is None:
            return stage.wait(next_part, why="waiting for trajectories")
        return not stage.draining and next_part()

    while more():
        for lane in lanes:
            if lane.lost is not None:
                _write_off(stage, lane, scorer.version)
            elif lane.part is not None:
                _score(stage, lane, scorer, tokenizer)
    stage.milestone(f"scorer {stage.replica} drained after {sum(lane.scores.rows for lane in lanes)} scores")


class _Lane:
    """One generator's trajectories, and the stream of their scores that this scorer writes."""

    def __init__(self, stage: Stage, generator: int, source: Store) -> None:
        self.scorer, self.num_scorers = stage.replica, stage.config.scoring.replicas
        path = layout.scores(stage.config.scoring.reward, generator, self.scorer, self.num_scorers)
        self.scores = StreamWriter(stage.store, path, SCORE, writer=f"score-{self.scorer}")
        self.trajectories = StreamReader(source, layout.trajectories(generator), TRAJECTORY)
        self.part: Part | None = None
        self.lost: tuple[Record, PartCorrupt] | None = None

    def look(self) -> bool:
        """Whether a part that is this scorer's share, and not scored yet, is there: then `part`, or `lost` with why."""
        wanted = self.scores.parts * self.num_scorers + self.scorer
        while self.part is None and self.trajectories.cursor.part < wanted:
            if self.trajectories.next_record() is None:
                return False
        if self.part is None:
            try:
                self.part = self.trajectories.next()
            except PartCorrupt as error:
                record = self.trajectories.next_record()
                assert record is not None, "the error came from this very record"
                self.lost = record, error
        return self.part is not None or self.lost is not None


def _score(stage: Stage, lane: _Lane, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
    assert lane.part is not None
    with stage.busy("score"):
        table = score_table(lane.part.table, scorer, tokenizer, each=stage.beat)
    failpoint("score.before_commit")
    _commit(stage, lane, table, lane.part.record)
    lane.part = None


def _write_off(stage: Stage, lane: _Lane, verifier_version: str) -> None:
    assert lane.lost is not None
    record, error = lane.lost
    stage.milestone(f"no scores for {record.rows} rollouts: {error}")
    _commit(stage, lane, unread_scores(record, str(error), verifier_version), record)
    lane.lost = None


def _commit(stage: Stage, lane: _Lane, table: pa.Table, record: Record) -> None:
    with stage.busy("commit"):
        lane.scores.write(
            table,
            tokens=record.tokens,
            min_policy_version=record.min_policy_version,
            max_policy_version=record.max_policy_version,
        )
    stage.progress(
        rollouts=stage.value("rollouts") + table.num_rows,
        tokens=stage.value("tokens") + record.tokens,
    )


def score_table(
    trajectories: pa.Table,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    each: Callable[[], None] = lambda: None,
) -> pa.Table:
    """Rows of `SCORE`, one for each row of `TRAJECTORY` and in its order. A reward that fails leaves an error, no 0.

    What is judged is what the policy said last: the text behind all that an environment wrote. A rollout that its
    environment broke off with an error is one here too. `each` is called again and again: scoring may take long.
    """
    metas = trajectories["meta"].to_pylist()
    errors = {row: error for row, meta in enumerate(metas) if (error := environment_error_of(meta)) is not None}
    prompts = [
        prompt_of(prompt_id, meta) for prompt_id, meta in zip(trajectories["prompt_id"].to_pylist(), metas, strict=True)
    ]
    responses = tokenizer.batch_decode([tokens.tolist() for tokens in answers(trajectories)], skip_special_tokens=True)
    whole = [row for row in range(len(metas)) if row not in errors]
    found = scorer.score_many([(prompts[row], responses[row]) for row in whole], each)
    judged = dict(zip(whole, found, strict=True))
    judged |= {row: Judged(score=failed(f"environment: {error}"), seconds=0.0) for row, error in errors.items()}
    row_ids = trajectories["row_id"].to_pylist()
    rows = [_score_row(row_id, scorer.version, judged[row]) for row, row_id in enumerate(row_ids)]
    return pa.Table.from_pylist(rows, schema=SCORE)


def _score_row(row_id: int, version: str, judged: Judged) -> dict[str, Any]:
    score = judged.score
    return {
        "row_id": row_id,
        "reward": score.reward,
        "components": json.dumps(score.components),
        "status": score.status,
        "error": score.error,
        "verifier_version": version,
        "seconds": judged.seconds,
    }


def unread_scores(record: Record, error: str, verifier_version: str) -> pa.Table:
    """Rows of `SCORE` for a part of trajectories that can't be read: no reward, and why."""
    columns = {
        "row_id": range(record.first_row_id, record.first_row_id + record.rows),
        "reward": [None] * record.rows,
        "components": ["{}"] * record.rows,
        "status": ["error"] * record.rows,
        "error": [error] * record.rows,
        "verifier_version": [verifier_version] * record.rows,
        "seconds": [0.0] * record.rows,
    }
    arrays = [pa.array(column, SCORE.field(name).type) for name, column in columns.items()]
    return pa.Table.from_arrays(arrays, schema=SCORE)


if __name__ == "__main__":
    run_stage("score", main)
