"""The score stage with a judge: several parts are asked for at once, committed in order, and counted across kills."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from support.rewards.stub_service import Reply, StubService, graded, judged, stub_service
from support.stores.dict_store import DictStore
from support.streams.rows import read_rows, trajectories_of
from transformers import PreTrainedTokenizerFast

from configs.schema import RunConfig
from millrace.models.decoder import decoder_of
from millrace.rewards.services.meter import LimitReached
from millrace.runtime.arguments import StageArguments
from millrace.runtime.messages import Event
from millrace.runtime.stage import Stage
from millrace.stages.score import _make_scorer, _score_all
from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.streams.stream import StreamWriter

PARTS, ROWS = 6, 4
SCORES = layout.annotations("scores/judge", 0, 0, 1)


class HurriedStage(Stage):
    """Waits for services until all parts are scored, then drains."""

    def wait(self, until: Any, *, why: object) -> bool:
        while self.value("rollouts") < PARTS * ROWS:
            if until():
                return True
        return False

    def _send(self, message: object) -> None:
        """Nobody listens."""


@pytest.fixture
def store(tokenizer: PreTrainedTokenizerFast) -> DictStore:
    """Part k has the responses 10·k to 10·k + 3."""
    store = DictStore()
    writer = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
    for part in range(PARTS):
        tokens = [tokenizer.convert_tokens_to_ids(list(f"{part}{row}")) for row in range(ROWS)]
        writer.write(trajectories_of(["default"] * ROWS, tokens, "42", part * ROWS), tokens=2 * ROWS)
    return store


def score(store: DictStore, tokenizer: PreTrainedTokenizerFast, service: StubService, **endpoint: Any) -> None:
    settings: dict[str, Any] = {
        "training": {"max_steps": 1, "groups_per_step": 100},
        "scoring": {
            "reward": "judge",
            "endpoint": {"url": service.url, "attempts": 1, **endpoint},
            "judge": {"model": "large", "highest": 100.0, "input_price": 1000.0},
        },
    }
    arguments = StageArguments(run_url="dict://", attempt=0, replica=0, handover=Path("/nowhere"))
    stage = HurriedStage(name="score", arguments=arguments, config=RunConfig.model_validate(settings), store=store)
    with _make_scorer(stage) as scorer:
        _score_all(stage, scorer, decoder_of(tokenizer))


def response_of(body: dict[str, Any]) -> str:
    [response] = json.loads(body["messages"][1]["content"])["responses"]
    return str(response)


def test_parts_are_asked_for_at_once_and_committed_in_their_order(
    store: DictStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    grade = graded(lambda response, _: float(response))
    last_part = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        # The first part is answered only once the last one is asked for.
        if response_of(body).startswith(str(PARTS - 1)):
            last_part.set()
        elif response_of(body).startswith("0"):
            assert last_part.wait(timeout=60)
        return grade(body)

    with stub_service(answer) as service:
        score(store, tokenizer, service)
    rows = read_rows(store, SCORES, SCORE)
    expected = [(10 * part + row) / 100 for part in range(PARTS) for row in range(ROWS)]
    assert [row["reward"] for row in rows] == pytest.approx(expected)
    assert [row["row_id"] for row in rows] == list(range(PARTS * ROWS))
    assert len(service.asked) == PARTS * ROWS


def test_exactly_the_rows_without_an_answer_are_errors(store: DictStore, tokenizer: PreTrainedTokenizerFast) -> None:
    grade = graded(lambda *_: 50.0)

    def answer(body: dict[str, Any]) -> Reply:
        match response_of(body)[1]:
            case "1":
                return 400, {}
            case "2":
                return 200, judged("Splendid!")
        return grade(body)

    with stub_service(answer) as service:
        score(store, tokenizer, service)
    rows = read_rows(store, SCORES, SCORE)
    assert [row["reward"] for row in rows] == [0.5, None, None, 0.5] * PARTS
    assert [row["status"] for row in rows] == ["ok", "error", "error", "ok"] * PARTS
    exchange = json.loads(rows[2]["exchange"])["judge"]
    assert exchange["answer"]["choices"][0]["message"]["content"] == "Splendid!"


def test_what_a_killed_scorer_asked_counts_towards_the_limit(
    store: DictStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    grade = graded(lambda *_: 50.0)
    # The evaluator has the other half.
    limit = {"max_requests": 2 * PARTS * ROWS, "in_flight": 1}

    def dies(body: dict[str, Any]) -> Reply:
        if response_of(body) == "20":
            # Nothing is answered from here on.
            raise_in_stage.set()
            is_over.wait()
        return grade(body)

    raise_in_stage, is_over = threading.Event(), threading.Event()

    class Killed(BaseException):
        """Ends the stage where it is."""

    class KilledStage(HurriedStage):
        def wait(self, until: Any, *, why: object) -> bool:
            def look() -> bool:
                if raise_in_stage.is_set():
                    raise Killed
                return bool(until())

            return super().wait(look, why=why)

    with stub_service(dies) as service, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "HurriedStage", KilledStage)
        with pytest.raises(Killed):
            score(store, tokenizer, service, **limit)
        is_over.set()
        first = len(service.asked)
    committed = len(read_rows(store, SCORES, SCORE))
    assert committed < PARTS * ROWS
    with stub_service(grade) as service, pytest.raises(LimitReached) as raised:
        score(store, tokenizer, service, **limit)
    assert raised.value.key == "scoring.endpoint.max_requests"
    assert first + len(service.asked) <= PARTS * ROWS
    assert len(read_rows(store, SCORES, SCORE)) >= committed


def test_a_scorer_that_pauses_at_its_limit_waits_until_it_is_asked_to_drain(
    store: DictStore, tokenizer: PreTrainedTokenizerFast
) -> None:
    sent: list[object] = []

    class PausedStage(HurriedStage):
        def wait(self, until: Any, *, why: object) -> bool:
            return "limit" not in str(why) and super().wait(until, why=why)

        def _send(self, message: object) -> None:
            sent.append(message)

    with stub_service(graded(lambda *_: 50.0)) as service, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "HurriedStage", PausedStage)
        score(store, tokenizer, service, max_requests=PARTS * ROWS, in_flight=1, at_limit="pause")
    # The evaluator has the other half.
    assert len(service.asked) == PARTS * ROWS / 2
    assert [row["status"] for row in read_rows(store, SCORES, SCORE)] == ["ok"] * (PARTS * ROWS // 2)
    assert [message.kind for message in sent if isinstance(message, Event)] == ["service.limit-reached"]


def test_neither_a_key_nor_a_control_character_reaches_a_record(
    store: DictStore, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    sent: list[object] = []

    class HeardStage(HurriedStage):
        def _send(self, message: object) -> None:
            sent.append(message)

    refusal = {"error": "\x1b[31mIncorrect API key provided: sk-s3cret\x07\x00"}
    with stub_service(lambda _: (401, refusal)) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", "sk-s3cret\n")
        patch.setitem(globals(), "HurriedStage", HeardStage)
        score(store, tokenizer, service, api_key="JUDGE_KEY")
    rows = read_rows(store, SCORES, SCORE)
    sentences = [message.payload["sentence"] for message in sent if isinstance(message, Event)]
    lines = [message for message in sent if isinstance(message, str)]
    shown = [*sentences, *lines, *(row["error"] for row in rows), *capfd.readouterr().err.splitlines()]
    assert len(sentences) == 1
    assert [text for text in shown if not text.isprintable()] == []
    assert "s3cret" not in f"{shown}{rows}"
