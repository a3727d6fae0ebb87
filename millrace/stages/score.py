"""The score stage: trajectories in, one score per trajectory out, in streams that match row by row.

    ║ trajectories/0 ║ ─► part k ─┐                                  ┌─► ║ scores/<pool>/0/s-of-S ║ part k div S
    ║ trajectories/1 ║ ─► part k ─┴─► k mod S = s? ─► score rows ────┴─► ║ scores/<pool>/1/s-of-S ║ part k div S

Scorer s of a pool of S reads every generator's trajectories, waits for the next part of its share, and writes one part
of scores per part of trajectories. With j parts in its own stream, trajectory part j·S + s is next. Each row of a part
that can't be read gets an error as its score, so that the streams stay aligned. In a replay the trajectories are the
stored run's, and the stage ends after the last part that the run scored.

Each row is scored by the reward of its source, which a scorer of another pool may have: then it is `elsewhere` in this
stream. A source whose reward fails for a whole step's worth of groups ends the run.

Services are asked for several parts at once; parts are committed in their order. When a scorer is asked to drain, it
waits for the answers that it asked for.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa

from millrace.models.decoder import Decoder, load_decoder
from millrace.models.start_folder import start_folder
from millrace.replay.recorded import RecordedScores
from millrace.replay.results import read_spec
from millrace.rewards.remote import RemoteReward
from millrace.rewards.rows import ELSEWHERE, UnscoredRows, unread_scores
from millrace.rewards.scorer import FailingReward, Scorer, make_scorer
from millrace.runtime.stage import Stage, run_stage
from millrace.stages.service_usage import ServiceUsage
from storage import layout
from storage.errors import PartCorrupt
from storage.failpoints import failpoint
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, StreamWriter

_AHEAD = 4
"""Parts of a generator that wait for services at once: a late answer must not hold up those of the next parts."""


def main(stage: Stage) -> None:
    """Scores until asked to drain; in a replay, until the end of the stored run."""
    with ExitStack() as stack:
        with stage.loading():
            decode = load_decoder(start_folder(stage.store, stage.config.model.path, stage.arguments.handover))
            scorer = stack.enter_context(_make_scorer(stage))
        _score_all(stage, scorer, decode)


def _make_scorer(stage: Stage) -> Scorer:
    """The scorer of the sources that this replica's pool scores."""
    sources, pools = stage.config.by_source(), stage.config.annotators
    pool, _ = pools.annotator("scores", stage.replica)
    return make_scorer({name: config for name, config in sources.items() if pools.of_source("scores", name) == pool})


def _score_all(stage: Stage, scorer: Scorer, decode: Decoder) -> None:
    spec = read_spec(stage.store)
    source = stage.store if spec is None else open_store(spec.sources[0])
    streams = [_UnscoredStream(stage, generator, source) for generator in range(stage.config.generation.replicas)]
    sources = {name: config for name, config in stage.config.by_source().items() if name in scorer.versions}
    rewards = {name: config.scoring.reward for name, config in sources.items()}
    groups = stage.config.training.groups_per_step
    failing = FailingReward(rewards, {name: groups * config.generation.group_size for name, config in sources.items()})
    scorer.on_first_failure = lambda sentence: _report_failure(stage, sentence)
    usage = ServiceUsage(stage, scorer)
    recorded = None if spec is None else RecordedScores(source)
    loaded = _joined(f"{rewards[name]} {version}" for name, version in scorer.versions.items())
    stage.mark_ready(f"scorer {stage.replica} ready with reward {loaded}")

    def store_usage(more: int = 0) -> None:
        if scorer.remote:
            in_flight = Counter(remote for stream in streams for remote in stream.open_requests())
            in_flight.update(dict.fromkeys(scorer.remote, more))
            stage.update_status(now=True, **usage.values(in_flight))

    def submit(generator: int, part: Part) -> UnscoredRows:
        for remote in scorer.remote:
            remote.recorded = {} if recorded is None else recorded.of_part(generator, part.record.part)
        store_usage(part.table.num_rows)
        with stage.busy("score"):
            return UnscoredRows.submit(part.table, scorer, decode)

    def wanted(generator: int, ordinal: int) -> bool:
        return recorded is None or recorded.has(generator, ordinal)

    def look() -> bool:
        found = [stream.read_ahead(submit, wanted, _AHEAD if scorer.remote else 1) for stream in streams]
        return any(found) or any(stream.is_answered for stream in streams)

    def more() -> bool:
        if spec is not None and not look() and not any(stream.unscored for stream in streams):
            return False
        return stage.wait(look, why="waiting for trajectories")

    while more():
        for stream in streams:
            while stream.is_answered:
                _score(stage, stream, scorer, failing)
                store_usage()
    for stream in streams:
        # Their answers are paid for.
        while stream.unscored:
            _score(stage, stream, scorer, failing)
    store_usage()
    stage.log(f"scorer {stage.replica} drained after {sum(stream.scores.rows for stream in streams)} scores")


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


@dataclass(kw_only=True)
class _Unscored:
    """A part of trajectories before its scores are committed."""

    record: Record
    rows: UnscoredRows | None
    """None if it can't be read."""
    error: str = ""
    """Then this is why."""


class _UnscoredStream:
    """One generator's trajectories and this scorer's stream of their scores."""

    def __init__(self, stage: Stage, generator: int, source: Store) -> None:
        pools = stage.config.annotators
        pool, self.scorer = pools.annotator("scores", stage.replica)
        self.num_scorers = pools.replicas[pool]
        path = layout.annotations(pool, generator, self.scorer, self.num_scorers)
        self.scores = StreamWriter(stage.store, path, SCORE, writer=f"score-{stage.replica}")
        self.trajectories = StreamReader(source, layout.trajectories(generator), TRAJECTORY)
        self.generator = generator
        self.unscored: deque[_Unscored] = deque()
        """This scorer's next parts, in their order."""

    @property
    def is_answered(self) -> bool:
        """Whether the next part can be scored without waiting for a service."""
        if not self.unscored:
            return False
        rows = self.unscored[0].rows
        return rows is None or rows.submitted.is_answered

    def open_requests(self) -> Iterator[RemoteReward]:
        """The reward of each request that is not answered."""
        for part in self.unscored:
            if part.rows is not None:
                for remote, requests in part.rows.submitted.asked.items():
                    yield from [remote for request in requests if not request.answer.done()]

    def read_ahead(
        self, submit: Callable[[int, Part], UnscoredRows], wanted: Callable[[int, int], bool], limit: int
    ) -> bool:
        """Submits this scorer's next parts, up to `limit` unscored ones; whether there was one.

        The first part that is not committed, or not `wanted`, is the end.
        """
        found = False
        while len(self.unscored) < limit and self._skip_others():
            if not wanted(self.generator, self.trajectories.cursor.part):
                break
            try:
                part = self.trajectories.next()
            except PartCorrupt as error:
                record = self.trajectories.next_record()
                assert record is not None, "the error came from this very record"
                self.unscored.append(_Unscored(record=record, rows=None, error=str(error)))
            else:
                if part is None:
                    break
                self.unscored.append(_Unscored(record=part.record, rows=submit(self.generator, part)))
            found = True
        return found

    def _skip_others(self) -> bool:
        """Passes the parts of other scorers; whether all before this scorer's next one are committed."""
        ordinal = self.scores.parts + len(self.unscored)
        while self.trajectories.cursor.part < layout.annotated_part(self.scorer, ordinal, self.num_scorers):
            if self.trajectories.next_record() is None:
                return False
        return True


def _report_failure(stage: Stage, sentence: str) -> None:
    stage.log(sentence)
    stage.emit_event("reward.failed", sentence=sentence)
    print(sentence, file=sys.stderr, flush=True)


def _score(stage: Stage, stream: _UnscoredStream, scorer: Scorer, failing: FailingReward) -> None:
    part = stream.unscored[0]
    if part.rows is None:
        stage.log(f"no scores for {part.record.rows} trajectories: {part.error}")
        table = unread_scores(part.record, part.error, _joined(scorer.versions.values()))
        _commit(stage, stream, table, part.record)
    else:
        with stage.busy("score"):
            table = part.rows.collect(each=stage.beat)
        failpoint("score.before_commit")
        _commit(stage, stream, table, part.record)
        columns = (part.rows.sources, *(table[name].to_pylist() for name in ("status", "error")))
        failing.check((source, error) for source, status, error in zip(*columns, strict=True) if status != ELSEWHERE)
    stream.unscored.popleft()


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


if __name__ == "__main__":
    run_stage("score", main)
