"""The score stage: trajectories in, one score per trajectory out (`millrace.stages.annotate`).

Each row is scored by the reward of its source, which a scorer of another pool may have: then it is `elsewhere` in this
stream. A source whose reward fails for a whole step's worth of groups ends the run. In a replay the trajectories are
the stored run's, and the stage ends after the last part that the run scored.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from configs.stored import AnnotationKind
from millrace.models.decoder import Decoder, load_decoder
from millrace.models.start_folder import start_folder
from millrace.replay.parts import ScoredParts
from millrace.replay.results import read_spec
from millrace.rewards.rows import ELSEWHERE, UnscoredRows, unread_scores
from millrace.rewards.scorer import FailingReward, Scorer, make_scorer
from millrace.rewards.services.meter import LimitReached
from millrace.rewards.services.remote import RemoteReward, digest
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from millrace.stages.annotate import annotate
from millrace.stages.service_usage import ServiceUsage, pause_at_limit
from storage.errors import PartCorrupt, PartRemoved
from storage.stores.factory import open_store
from storage.streams.record import Record
from storage.streams.stream import Part


def main(stage: Stage) -> None:
    """Scores until asked to drain; in a replay, until the end of the stored run."""
    with ExitStack() as stack:
        with stage.loading():
            decode = load_decoder(start_folder(stage.store, stage.config.model.path, stage.arguments.handover))
            scorer = stack.enter_context(_make_scorer(stage))
        _score_all(stage, scorer, decode)


def _make_scorer(stage: Stage) -> Scorer:
    """Makes the scorer of the sources that this replica's pool scores."""
    sources, pools = stage.config.by_source(), stage.config.annotators
    pool, _ = pools.annotator("scores", stage.replica)
    return make_scorer({name: config for name, config in sources.items() if pools.of_source("scores", name) == pool})


def _score_all(stage: Stage, scorer: Scorer, decode: Decoder) -> None:
    spec = read_spec(stage.store)
    source = None if spec is None else open_store(spec.sources[0])
    recorded = None if source is None else ScoredParts(source)
    # The last parts of a stored run may have no scores.
    is_wanted = None if recorded is None else recorded.is_scored
    annotator = _ScoreAnnotator(stage, scorer, decode, recorded)
    try:
        num_scores = annotate(stage, annotator, source=source, is_wanted=is_wanted)
    except LimitReached as error:
        pause_at_limit(stage, error)
    else:
        annotator.store_usage()
        stage.log(f"scorer {stage.replica} drained after {num_scores} scores")


class _ScoreAnnotator:
    """Scores parts, and keeps account of the services that it asks."""

    kind: AnnotationKind = "scores"

    def __init__(self, stage: Stage, scorer: Scorer, decode: Decoder, recorded: ScoredParts | None) -> None:
        self._stage, self._scorer, self._decode, self._recorded = stage, scorer, decode, recorded
        sources = {name: config for name, config in stage.config.by_source().items() if name in scorer.versions}
        rewards = {name: config.scoring.reward for name, config in sources.items()}
        groups = stage.config.training.groups_per_step
        responses = {name: groups * config.generation.group_size for name, config in sources.items()}
        self._failing = FailingReward(rewards, responses)
        self._usage = ServiceUsage(stage, scorer)
        self._open: list[UnscoredRows] = []
        """Submitted rows, perhaps without all answers."""
        self._slots = {remote: sources[remote.source].scoring.endpoint.in_flight for remote in scorer.remote}
        scorer.on_first_failure = self._report_failure
        loaded = _joined(f"{rewards[name]} {version}" for name, version in scorer.versions.items())
        stage.mark_ready(f"scorer {stage.replica} ready with reward {loaded}")

    def submit(self, generator: int, part: Part) -> UnscoredRows:
        """Asks services for the part's scores."""
        for remote in self._scorer.remote:
            remote.recorded = {} if self._recorded is None else _answers(self._recorded, generator, part.record.part)
        # Before the requests are made, so that those of a killed process count.
        self.store_usage(part.table.num_rows)
        with self._stage.busy("score"):
            rows = UnscoredRows.submit(part.table, self._scorer, self._decode, each=self._stage.beat)
        self._open.append(rows)
        return rows

    def unread_rows(self, record: Record, error: str) -> pa.Table:
        """Returns scores that hold the error."""
        return unread_scores(record, error, _joined(self._scorer.versions.values()))

    def has_room(self) -> bool:
        """Whether each service has a free slot."""
        num_open = self._num_open()
        return bool(self._slots) and all(num_open[remote] < slots for remote, slots in self._slots.items())

    def on_commit(self, part: Part, rows: pa.Table) -> None:
        """Stores what services were asked. Raises InputError if a source's reward fails for every response."""
        self.store_usage()
        columns = (part.table["source"].to_pylist(), rows["status"].to_pylist(), rows["error"].to_pylist())
        scored = [(source, error) for source, status, error in zip(*columns, strict=True) if status != ELSEWHERE]
        self._failing.check(scored)

    def store_usage(self, more: int = 0) -> None:
        """Stores what services were asked, requests in flight and `more` of each included."""
        if self._scorer.remote:
            in_flight = self._num_open()
            in_flight.update(dict.fromkeys(self._scorer.remote, more))
            self._stage.update_status(now=True, **self._usage.values(in_flight))

    def _num_open(self) -> Counter[RemoteReward]:
        """Number of requests without an answer, by reward."""
        self._open = [rows for rows in self._open if not rows.is_ready]
        num_open: Counter[RemoteReward] = Counter()
        for rows in self._open:
            for remote, requests in rows.submitted.asked.items():
                num_open[remote] += sum(not request.answer.done() for request in requests)
        return num_open

    def _report_failure(self, sentence: str) -> None:
        self._stage.log(sentence)
        self._stage.emit_event("reward.failed", sentence=sentence)
        print(sentence, file=sys.stderr, flush=True)


def _answers(recorded: ScoredParts, generator: int, ordinal: int) -> Mapping[str, Mapping[str, Any]]:
    """The stored answers of services for a part, by `digest` of the request; none if its scores can't be read."""
    try:
        scores = recorded.scores(generator, ordinal, ["exchange"])
    except (PartCorrupt, PartRemoved):
        return {}
    texts = [] if scores is None else scores["exchange"].drop_null().to_pylist()
    exchanges = [exchange for text in texts for exchange in json.loads(text).values()]
    return {digest(exchange["request"]): exchange["answer"] for exchange in exchanges if exchange["answer"]}


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    run_stage("score", main)
