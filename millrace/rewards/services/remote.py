"""The rewards that a service computes, and `http` among them, for any service that takes rows as JSON.

    pairs ─► requests: a row, several rows, or a group ─► Endpoint ─► answers ─► a score per pair
                                   └─► recorded before? then that answer, without a request

Answers are hostile: a fault of an answer, or of one of its rows, is an error of the pairs in it, and of no others.
"""

import hashlib
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from configs.task import EndpointConfig
from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.services.endpoint import Answer, Endpoint
from millrace.rewards.services.meter import Prices
from millrace.rewards.services.served_model import ServedModel
from millrace.types import Prompt

Pair = tuple[Prompt, str]
_BEAT_SECONDS = 0.5


class Asked(NamedTuple):
    """A request for the scores of `num_pairs` pairs."""

    body: dict[str, Any]
    num_pairs: int
    answer: "Future[Answer]"


class RemoteReward(Reward):
    """A reward whose scores are a service's answers. Requests are in flight from `submit` until `collect`."""

    path: str
    """Where requests go, below the URL."""

    def __init__(self, endpoint: Endpoint | ServedModel) -> None:
        self.endpoint = endpoint
        self.recorded: Mapping[str, Mapping[str, Any]] = {}
        """Answers by `digest` of the request: these are not asked for again."""

    def load(self) -> None:
        """Start the thread that asks. The first request shows whether a service is there."""
        self.endpoint.open()

    def submit(self, pairs: Sequence[Pair]) -> list[Asked]:
        """Ask for the scores of `pairs`."""
        asked = []
        for body, num_pairs in self.requests(pairs):
            recorded = self.recorded.get(digest(body))
            answer: Future[Answer] = Future()
            if recorded is None:
                answer = self.endpoint.submit(self.path, body)
            else:
                answer.set_result(Answer(values=recorded))
            asked.append(Asked(body, num_pairs, answer))
        return asked

    def collect(self, asked: Sequence[Asked], each: Callable[[], None]) -> list[Score]:
        """Waits for all answers, and returns the scores in the order of the pairs. Raises LimitReached."""
        pending = {request.answer for request in asked}
        while pending:
            pending = wait(pending, timeout=_BEAT_SECONDS).not_done
            each()
        return [score for request in asked for score in self._scores(request)]

    def _scores(self, request: Asked) -> list[Score]:
        answer = request.answer.result()
        if answer.values is None:
            scores = [failed(answer.error or "", answer.status)] * request.num_pairs
        else:
            try:
                scores = self.read(answer.values, request)
            except Exception as error:  # noqa: BLE001 — an answer may have any form
                scores = [failed(f"an unusable answer: {error}")] * request.num_pairs
        seconds = answer.seconds / request.num_pairs
        # The first row of several has the exchange.
        exchange = {self.name: {"request": request.body, "answer": answer.values}}
        return [
            replace(score, seconds=seconds, t=answer.t, exchange={} if row else exchange)
            for row, score in enumerate(scores)
        ]

    def score(self, prompt: Prompt, response: str) -> Score:
        """`score_batch` asks for many at once."""
        return self.score_batch([(prompt, response)])[0]

    def score_batch(self, pairs: Sequence[Pair]) -> list[Score]:
        """Ask for all at once and wait."""
        return self.collect(self.submit(pairs), lambda: None)

    @abstractmethod
    def requests(self, pairs: Sequence[Pair]) -> Iterator[tuple[dict[str, Any], int]]:
        """The body of each request, and how many of the pairs it is about, in their order."""

    @abstractmethod
    def read(self, answer: Mapping[str, Any], asked: Asked) -> list[Score]:
        """The scores of the pairs of `asked`. Raises any exception if the answer has another form."""


class HttpReward(RemoteReward):
    """The scores of a service that takes `{"rows": [{"prompt", "response", "answer"}]}`.

    It answers `{"scores": [...]}`, one per row: a number, or `{"reward": …, "components": {…}}`, or `{"error": "…"}`.
    """

    name = "http"
    path = ""

    def __init__(self, *, endpoint: Mapping[str, Any], timeout_seconds: float) -> None:
        """`endpoint` is the section `scoring.endpoint`. Raises InputError for a URL or key that can't be used."""
        service = Endpoint(EndpointConfig.model_validate(endpoint), timeout_seconds, Prices())
        super().__init__(service)
        self._rows = endpoint["rows"]
        self.version = f"1 {service.url}"

    def requests(self, pairs: Sequence[Pair]) -> Iterator[tuple[dict[str, Any], int]]:
        """Up to `scoring.endpoint.rows` pairs in each."""
        for first in range(0, len(pairs), self._rows):
            rows = [
                {"prompt": prompt.text, "response": response, "answer": prompt.answer}
                for prompt, response in pairs[first : first + self._rows]
            ]
            yield {"rows": rows}, len(rows)

    def read(self, answer: Mapping[str, Any], asked: Asked) -> list[Score]:
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(scores) != asked.num_pairs:
            raise ValueError(f"its `scores` are not a list of {asked.num_pairs}: {json.dumps(answer)}")
        return [_row_score(score) for score in scores]


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of plain JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _row_score(values: Any) -> Score:
    """The score of a row, or an error that shows the row."""
    row = values if isinstance(values, dict) else {"reward": values}
    if row.get("error") is not None:
        return failed(f"the service: {row['error']}")
    components = {} if row.get("components") is None else row["components"]
    if isinstance(components, dict) and all(map(_is_number, (row.get("reward"), *components.values()))):
        with suppress(ValueError):
            return Score(reward=float(row["reward"]), components={name: float(components[name]) for name in components})
    return failed(f"not a score: {json.dumps(values)}")


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold; true and false are none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
