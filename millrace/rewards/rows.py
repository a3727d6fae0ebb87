"""The rows of the score stream that belong to a part of trajectories.

trajectories ─► answers, decoded ─► submitted to the scorer ─► scores ─► rows, in the order of the trajectories
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.models.decoder import CONTEXT_TOKENS, Decoder
from millrace.rewards.base import Score, failed
from millrace.rewards.scorer import Scorer, Submitted
from millrace.rollouts.arrow import answers, before_answers, environment_error_of, prompt_of
from storage.schema import SCORE
from storage.streams.record import Record

ELSEWHERE = "elsewhere"
"""Status of a row of a source that this scorer has no reward for."""


@dataclass(frozen=True, kw_only=True)
class UnscoredRows:
    """The rows of a part on their way to their scores."""

    scorer: Scorer
    row_ids: list[int]
    sources: list[str]
    """Of every row."""
    submitted_rows: list[int]
    """The place in the part of each submitted item."""
    submitted: Submitted
    errors: dict[int, str]
    """By place in the part: why its environment ended a trajectory."""
    each: Callable[[], None]
    """Called regularly by `collect`, because scoring may take long."""

    @classmethod
    def submit(
        cls, trajectories: pa.Table, scorer: Scorer, decode: Decoder, each: Callable[[], None] = lambda: None
    ) -> "UnscoredRows":
        """Begins to score rows of `TRAJECTORY`.

        The policy's final answer is scored: the text after the last token written by an environment.
        """
        sources = trajectories["source"].to_pylist()
        served = [row for row, source in enumerate(sources) if source in scorer.versions]
        rows = trajectories if len(served) == len(sources) else trajectories.take(pa.array(served, pa.int64()))
        metas = rows["meta"].to_pylist()
        errors = [environment_error_of(meta) for meta in metas]
        prompts = map(prompt_of, rows["prompt_id"].to_pylist(), metas)
        responses = decode(
            [tokens.tolist() for tokens in before_answers(rows, CONTEXT_TOKENS)],
            [tokens.tolist() for tokens in answers(rows)],
            [reason == "stop" for reason in rows["finish_reason"].to_pylist()],
        )
        whole = [
            (row, (sources[row], prompt, response))
            for row, prompt, response, error in zip(served, prompts, responses, errors, strict=True)
            if error is None
        ]
        return cls(
            scorer=scorer,
            row_ids=trajectories["row_id"].to_pylist(),
            sources=sources,
            submitted_rows=[row for row, _ in whole],
            submitted=scorer.submit([item for _, item in whole]),
            errors={row: error for row, error in zip(served, errors, strict=True) if error is not None},
            each=each,
        )

    @property
    def is_ready(self) -> bool:
        """Whether all answers of services have arrived."""
        return self.submitted.is_answered

    def collect(self) -> pa.Table:
        """Rows of `SCORE`, one per row of the part and in its order. A failed reward is an error, not a reward of 0.

        A trajectory that its environment ended with an error gets an error. Raises LimitReached.
        """
        scores = dict(zip(self.submitted_rows, self.scorer.collect(self.submitted, self.each), strict=True))
        scores |= {row: failed(f"environment: {error}") for row, error in self.errors.items()}
        versions = self.scorer.versions
        rows = [
            _row(row_id, versions[source], scores[row]) if row in scores else _row_elsewhere(row_id)
            for row, (row_id, source) in enumerate(zip(self.row_ids, self.sources, strict=True))
        ]
        return pa.Table.from_pylist(rows, schema=SCORE)


def unread_scores(record: Record, error: str, verifier_version: str) -> pa.Table:
    """Rows of `SCORE` for a part of trajectories that can't be read: no reward, and the error."""
    unread = Score(reward=None, status="error", error=error)
    row_ids = range(record.first_row_id, record.first_row_id + record.rows)
    return pa.Table.from_pylist([_row(row_id, verifier_version, unread) for row_id in row_ids], schema=SCORE)


def _row(row_id: int, version: str, score: Score) -> dict[str, Any]:
    return {
        "row_id": row_id,
        "reward": score.reward,
        "components": json.dumps(score.components),
        "status": score.status,
        "error": score.error,
        "verifier_version": version,
        "seconds": score.seconds,
        "t_scored": score.t,
        "exchange": json.dumps(score.exchange) if score.exchange else None,
    }


def _row_elsewhere(row_id: int) -> dict[str, Any]:
    nothing = {"reward": None, "components": "{}", "error": None, "verifier_version": "", "seconds": 0.0}
    return {"row_id": row_id, "status": ELSEWHERE, "exchange": None, "t_scored": 0.0, **nothing}
