"""The score stage: trajectories in, one score per trajectory out, in streams that match row by row.

    ║ trajectories/0 ║ ─► part k ─┐                                  ┌─► ║ scores/<pool>/0/s-of-S ║ part k div S
    ║ trajectories/1 ║ ─► part k ─┴─► k mod S = s? ─► score rows ────┴─► ║ scores/<pool>/1/s-of-S ║ part k div S

Scorer s of a pool of S reads every generator's trajectories, waits for the next part of its share, and writes one part
of scores per part of trajectories. With j parts in its own stream, trajectory part j·S + s is next. Each row of a part
that can't be read gets an error as its score, so that the streams stay aligned. In a replay the trajectories are the
stored run's, and the stage ends after the last part.

Each row is scored by the reward of its source, which a scorer of another pool may have: then it is `elsewhere` in this
stream. A source whose reward fails for a whole step's worth of groups ends the run.
"""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from millrace.models.decoder import CONTEXT_TOKENS, Decoder, load_decoder
from millrace.models.start_folder import start_folder
from millrace.replay.results import read_spec
from millrace.rewards.base import Score, failed
from millrace.rewards.scorer import FailingReward, Scorer, make_scorer
from millrace.rollouts.arrow import answers, before_answers, environment_error_of, prompt_of
from millrace.runtime.stage import Stage, run_stage
from storage import layout
from storage.errors import PartCorrupt
from storage.failpoints import failpoint
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, StreamWriter

_ELSEWHERE = {
    "reward": None, "components": "{}", "status": "elsewhere", "error": None, "verifier_version": "", "seconds": 0.0,
}  # fmt: skip


def main(stage: Stage) -> None:
    """Scores until asked to drain; in a replay, until the end of the stored run."""
    with ExitStack() as stack:
        with stage.loading():
            decode = load_decoder(start_folder(stage.store, stage.config.model.path, stage.arguments.handover))
            scorer = stack.enter_context(_make_scorer(stage))
        _score_all(stage, scorer, decode)


def _make_scorer(stage: Stage) -> Scorer:
    """The scorer of the sources that this replica's pool scores."""
    sources, scorers = stage.config.by_source(), stage.config.scorers
    pool, _ = scorers.scorer(stage.replica)
    return make_scorer({name: config for name, config in sources.items() if scorers.of_source(name) == pool})


def _score_all(stage: Stage, scorer: Scorer, decode: Decoder) -> None:
    spec = read_spec(stage.store)
    source = stage.store if spec is None else open_store(spec.sources[0])
    streams = [_UnscoredStream(stage, generator, source) for generator in range(stage.config.generation.replicas)]
    sources = {name: config for name, config in stage.config.by_source().items() if name in scorer.versions}
    rewards = {name: config.scoring.reward for name, config in sources.items()}
    groups = stage.config.training.groups_per_step
    failing = FailingReward(rewards, {name: groups * config.generation.group_size for name, config in sources.items()})
    scorer.on_first_failure = lambda sentence: _report_failure(stage, sentence)
    loaded = _joined(f"{rewards[name]} {version}" for name, version in scorer.versions.items())
    stage.mark_ready(f"scorer {stage.replica} ready with reward {loaded}")

    def next_part() -> bool:
        return any(stream.look() for stream in streams)

    def more() -> bool:
        if spec is None:
            return stage.wait(next_part, why="waiting for trajectories")
        return not stage.draining and next_part()

    while more():
        for stream in streams:
            if stream.lost is not None:
                _write_off(stage, stream, _joined(scorer.versions.values()))
            elif stream.part is not None:
                _score(stage, stream, scorer, decode, failing)
    stage.log(f"scorer {stage.replica} drained after {sum(stream.scores.rows for stream in streams)} scores")


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


class _UnscoredStream:
    """One generator's trajectories and this scorer's stream of their scores."""

    def __init__(self, stage: Stage, generator: int, source: Store) -> None:
        scorers = stage.config.scorers
        pool, self.scorer = scorers.scorer(stage.replica)
        self.num_scorers = scorers.replicas[pool]
        path = layout.scores(pool, generator, self.scorer, self.num_scorers)
        self.scores = StreamWriter(stage.store, path, SCORE, writer=f"score-{stage.replica}")
        self.trajectories = StreamReader(source, layout.trajectories(generator), TRAJECTORY)
        self.part: Part | None = None
        self.lost: tuple[Record, PartCorrupt] | None = None

    def look(self) -> bool:
        """Whether this scorer's next part has been committed; then it is in `part`, or in `lost` with the error."""
        next_part = layout.scored_part(self.scorer, self.scores.parts, self.num_scorers)
        while self.part is None and self.trajectories.cursor.part < next_part:
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


def _report_failure(stage: Stage, sentence: str) -> None:
    stage.log(sentence)
    stage.emit_event("reward.failed", sentence=sentence)
    print(sentence, file=sys.stderr, flush=True)


def _score(stage: Stage, stream: _UnscoredStream, scorer: Scorer, decode: Decoder, failing: FailingReward) -> None:
    assert stream.part is not None
    trajectories = stream.part.table
    with stage.busy("score"):
        table = score_table(trajectories, scorer, decode, each=stage.beat)
    failpoint("score.before_commit")
    _commit(stage, stream, table, stream.part.record)
    stream.part = None
    rows = zip(trajectories["source"].to_pylist(), table["status"].to_pylist(), table["error"].to_pylist(), strict=True)
    failing.check((source, error) for source, status, error in rows if status != _ELSEWHERE["status"])


def _write_off(stage: Stage, stream: _UnscoredStream, verifier_version: str) -> None:
    assert stream.lost is not None
    record, error = stream.lost
    stage.log(f"no scores for {record.rows} trajectories: {error}")
    _commit(stage, stream, unread_scores(record, str(error), verifier_version), record)
    stream.lost = None


def _commit(stage: Stage, stream: _UnscoredStream, table: pa.Table, record: Record) -> None:
    with stage.busy("commit"):
        stream.scores.write(
            table,
            tokens=record.tokens,
            min_policy_version=record.min_policy_version,
            max_policy_version=record.max_policy_version,
        )
    stage.update_status(
        rollouts=stage.value("rollouts") + table.num_rows,
        errors=stage.value("errors") + sum(status in ("timeout", "error") for status in table["status"].to_pylist()),
        tokens=stage.value("tokens") + record.tokens,
    )


def score_table(
    trajectories: pa.Table,
    scorer: Scorer,
    decode: Decoder,
    each: Callable[[], None] = lambda: None,
) -> pa.Table:
    """Rows of `SCORE`, one per row of `TRAJECTORY` and in its order. A failed reward is an error, not a reward of 0.

    A row of a source that this scorer has no reward for is `elsewhere`.
    The policy's final answer is scored: the text after the last token written by an environment. A trajectory that its
    environment ended with an error gets an error. `each` is called regularly, because scoring may take long.
    """
    sources, row_ids = trajectories["source"].to_pylist(), trajectories["row_id"].to_pylist()
    served = [row for row, source in enumerate(sources) if source in scorer.versions]
    rows = [{"row_id": row_id, **_ELSEWHERE} for row_id in row_ids]
    if len(served) < len(rows):
        trajectories = trajectories.take(pa.array(served, pa.int64()))
    metas = trajectories["meta"].to_pylist()
    errors = {row: error for row, meta in enumerate(metas) if (error := environment_error_of(meta)) is not None}
    prompts = [
        prompt_of(prompt_id, meta) for prompt_id, meta in zip(trajectories["prompt_id"].to_pylist(), metas, strict=True)
    ]
    responses = decode(
        [tokens.tolist() for tokens in before_answers(trajectories, CONTEXT_TOKENS)],
        [tokens.tolist() for tokens in answers(trajectories)],
        [reason == "stop" for reason in trajectories["finish_reason"].to_pylist()],
    )
    whole = [row for row in range(len(metas)) if row not in errors]
    items = [(sources[served[row]], prompts[row], responses[row]) for row in whole]
    scores = dict(zip(whole, scorer.score_many(items, each), strict=True))
    scores |= {row: failed(f"environment: {error}") for row, error in errors.items()}
    for row, place in enumerate(served):
        rows[place] = _score_row(row_ids[place], scorer.versions[sources[place]], scores[row])
    return pa.Table.from_pylist(rows, schema=SCORE)


def _score_row(row_id: int, version: str, score: Score) -> dict[str, Any]:
    return {
        "row_id": row_id,
        "reward": score.reward,
        "components": json.dumps(score.components),
        "status": score.status,
        "error": score.error,
        "verifier_version": version,
        "seconds": score.seconds,
    }


def unread_scores(record: Record, error: str, verifier_version: str) -> pa.Table:
    """Rows of `SCORE` for a part of trajectories that can't be read: no reward, and the error."""
    unread = Score(reward=None, status="error", error=error)
    row_ids = range(record.first_row_id, record.first_row_id + record.rows)
    rows = [_score_row(row_id, verifier_version, unread) for row_id in row_ids]
    return pa.Table.from_pylist(rows, schema=SCORE)


if __name__ == "__main__":
    run_stage("score", main)
