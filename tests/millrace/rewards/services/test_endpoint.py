"""A client of a service: many requests at once, within its limits, and no failure that goes unseen."""

import gzip
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.rewards.stub_service import Reply, StubService, judged, stub_service

from configs.task import EndpointConfig
from millrace.errors import InputError
from millrace.rewards.services.endpoint import Answer, Endpoint
from millrace.rewards.services.meter import LimitReached, Prices, Usage

DEEP = b'{"a": ' * 900 + b"1" + b"}" * 900
"""Read by JSON's decoder, and too deep for its encoder further up the stack."""
PRICES = Prices(input=1000.0, output=10_000.0)
"""A request of the stub's judge costs 0.2: 100 tokens are read and 10 written."""


@contextmanager
def endpoint_of(url: str, timeout_seconds: float = 30.0, **settings: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(EndpointConfig(url=url, **settings), timeout_seconds, PRICES)
    endpoint.open()
    try:
        yield endpoint
    finally:
        endpoint.close()


def ask(service: StubService, count: int = 1, **settings: Any) -> list[Answer]:
    with endpoint_of(service.url, **settings) as endpoint:
        return [future.result() for future in [endpoint.submit("", {"number": n}) for n in range(count)]]


def test_as_many_requests_as_configured_are_in_flight_at_once() -> None:
    # Nothing is answered before eight are there.
    barrier = threading.Barrier(8)

    def answer(body: dict[str, Any]) -> Reply:
        barrier.wait(timeout=30)
        return 200, {"number": body["number"]}

    with stub_service(answer) as service:
        answers = ask(service, 24, in_flight=8)
    assert [found.values for found in answers] == [{"number": n} for n in range(24)]
    assert service.most_at_once == 8


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_service_is_asked_again(status: int) -> None:
    replies = iter([(status, {}), (status, {}), (200, {"is": "well"})])
    with stub_service(lambda _: next(replies)) as service:
        [answer] = ask(service)
    assert (answer.values, answer.status) == ({"is": "well"}, "ok")
    assert len(service.asked) == 3


def test_a_service_says_how_long_to_wait() -> None:
    replies = iter([(429, {}), (200, {})])
    with stub_service(lambda _: next(replies)) as service:
        service.reply_headers["retry-after"] = "0.5"
        ask(service)
    first, second = (asked.t for asked in service.asked)
    assert second - first >= 0.5


@pytest.mark.parametrize(
    "reply",
    [(400, {}), (200, b"<html>"), (200, [1]), (200, b"[" * 100_000), (200, DEEP), (200, b"")],
)
def test_an_unusable_answer_is_an_error_at_once(reply: Reply) -> None:
    with stub_service(lambda _: reply) as service:
        [answer] = ask(service)
    assert (answer.values, answer.status) == (None, "error")
    assert len(service.asked) == 1


def test_a_number_beyond_any_integer_costs_no_other_value_of_its_answer() -> None:
    with stub_service(lambda _: (200, b'{"scores": [1, ' + b"1" * 5000 + b"]}")) as service:
        [answer] = ask(service)
    assert answer.values == {"scores": [1, math.inf]}


def test_an_answer_without_end_is_an_error() -> None:
    with stub_service(lambda _: (200, b" " * (5 << 20))) as service:
        [answer] = ask(service)
    assert answer.status == "error"


def test_answers_are_asked_for_as_they_are_and_never_unpacked() -> None:
    reply = (200, gzip.compress(b'{"a": 1}'))
    with stub_service(lambda _: reply) as service:
        service.reply_headers["content-encoding"] = "gzip"
        [packed] = ask(service)
        reply = (200, {"a": 1})
        [named_so] = ask(service)
    assert service.asked[0].headers["accept-encoding"] == "identity"
    assert (packed.status, named_so.values) == ("error", {"a": 1})


def test_an_error_with_status_200_is_tried_again_where_it_says_so() -> None:
    busy = {"error": {"code": 429, "message": "slow down"}}
    replies = iter([(200, busy), (200, busy), (200, {"error": {"code": "invalid_request", "message": "too long"}})])
    with stub_service(lambda _: next(replies)) as service:
        [answer] = ask(service)
    assert (answer.status, len(service.asked)) == ("error", 3)
    assert answer.error is not None and "too long" in answer.error


@pytest.mark.parametrize(
    "usage", [None, 3, {}, {"prompt_tokens": 10**400, "completion_tokens": 1}, {"prompt_tokens": 1.5}]
)
def test_a_cost_limit_ends_with_the_first_answer_that_reports_no_tokens(usage: object) -> None:
    with stub_service(lambda _: (200, {"usage": usage})) as service:
        assert ask(service)[0].status == "ok"
        with pytest.raises(LimitReached) as raised:
            ask(service, max_cost=2.0, at_limit="pause")
    assert (raised.value.key, raised.value.pauses) == ("scoring.endpoint.max_cost", True)


def test_a_service_that_hangs_times_out_alone() -> None:
    ends = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        if body["number"] == 1:
            ends.wait()
        return 200, {}

    with stub_service(answer) as service:
        answers = ask(service, 3, timeout_seconds=2.0)
        ends.set()
    assert [found.status for found in answers] == ["ok", "timeout", "ok"]


def test_a_dead_service_is_an_error_after_all_attempts() -> None:
    with stub_service(lambda _: (200, {})) as service:
        pass
    with endpoint_of(service.url, attempts=2) as endpoint:
        answer = endpoint.submit("", {}).result()
        assert endpoint.meter.usage.requests == 2
    assert (answer.values, answer.status) == (None, "error")


def test_requests_start_no_faster_than_their_rate() -> None:
    with stub_service(lambda _: (200, {})) as service:
        started = time.monotonic()
        ask(service, 6, requests_per_minute=1200)
    # However late the others come in, the last one can't come in before its turn.
    assert max(asked.t for asked in service.asked) >= started + 5 * 0.05


def test_waiting_for_a_turn_is_no_time_of_the_service() -> None:
    with stub_service(lambda _: (200, {})) as service:
        answers = ask(service, 4, requests_per_minute=60, timeout_seconds=2.0)
    assert {answer.status for answer in answers} == {"ok"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"max_requests": 10}, "scoring.endpoint.max_requests"), ({"max_cost": 2.0}, "scoring.endpoint.max_cost")],
)
def test_limits_are_shared_and_outlive_a_process(settings: dict[str, Any], key: str) -> None:
    with stub_service(lambda _: (200, judged("{}"))) as service:
        # The half of two processes is five requests; a predecessor made two.
        with endpoint_of(service.url, in_flight=1, **settings) as endpoint:
            endpoint.meter.begin(Usage(requests=2, input_tokens=200, output_tokens=20), sharers=2)
            futures = [endpoint.submit("", {}) for _ in range(4)]
            assert [future.result().status for future in futures[:3]] == ["ok"] * 3
            with pytest.raises(LimitReached) as raised:
                futures[3].result()
            assert endpoint.meter.usage == Usage(requests=5, input_tokens=500, output_tokens=50)
        assert len(service.asked) == 3
    assert raised.value.key == key


ECHOES = {
    "a refusal": (401, {"error": {"message": "Incorrect API key provided: sk-s3cret/1."}}),
    "escaped JSON": (400, b'{"error": "sk-s3cret\\/1"}'),
    "text": (500, b"<p>sk-s3cret/1</p>" * 100),
    "an answer": (200, {"choices": [{"message": {"content": ["sk-s3cret/1"]}}], "sk-s3cret/1": 1}),
}


@pytest.mark.parametrize("reply", ECHOES.values(), ids=ECHOES.keys())
def test_a_key_without_its_line_end_is_sent_and_replaced_where_a_service_echoes_it(
    reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", " sk-s3cret/1\r\n")
    with stub_service(lambda _: reply) as service:
        [answer] = ask(service, api_key="JUDGE_KEY", attempts=1)
    assert service.asked[0].headers["authorization"] == "Bearer sk-s3cret/1"
    assert "s3cret" not in repr(answer)
    assert "(API key)" in repr(answer)


def test_a_placeholder_as_key_leaves_answers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "1")
    with stub_service(lambda _: (200, {"grade": "10"})) as service:
        [answer] = ask(service, api_key="JUDGE_KEY")
    assert answer.values == {"grade": "10"}


@pytest.mark.parametrize("value", ["s3cret\nkey", "s3cret key", "s3crét", "s3cret\x1b", "\ufeffs3cret", " \n", None])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(InputError) as raised:
        Endpoint(EndpointConfig(url="http://127.0.0.1/v1", api_key="JUDGE_KEY"), 1.0, PRICES)
    assert raised.value.key == "scoring.endpoint.api_key"
    assert "s3cr" not in str(raised.value)


def test_a_key_in_the_place_of_its_variables_name_is_refused_without_being_shown() -> None:
    with pytest.raises(InputError) as raised:
        Endpoint(EndpointConfig(url="http://127.0.0.1/v1", api_key="sk-s3cret"), 1.0, PRICES)
    assert raised.value.key == "scoring.endpoint.api_key"
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        *(None, "", "ftp://host/", "judge", "http://", "http://xn--/", "http://host:99999/v1", "http://host:0"),
        *("http://user:s3cret@host/v1", "http://user:s3cret@host:99999", "http://user:s3c/s3cret@host"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str | None) -> None:
    with pytest.raises(InputError) as raised:
        Endpoint(EndpointConfig.model_construct(url=url, api_key=None), 1.0, PRICES)
    assert raised.value.key == "scoring.endpoint.url"
    assert "s3cret" not in str(raised.value)


def test_closing_gives_up_what_is_in_flight() -> None:
    ends = threading.Event()

    def answer(_: dict[str, Any]) -> Reply:
        ends.wait()
        return 200, {}

    with stub_service(answer) as service:
        with endpoint_of(service.url) as endpoint:
            future = endpoint.submit("", {})
            while not service.asked:
                time.sleep(0.01)
        assert future.cancelled()
        ends.set()
