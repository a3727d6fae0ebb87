"""A client of a service: many requests at once, within its limits, and no failure that goes unseen."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.rewards.stub_service import Reply, StubService, judged, stub_service

from configs.task import EndpointConfig
from millrace.errors import InputError
from millrace.rewards.endpoint import Answer, Endpoint, LimitReached, Prices, Usage

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


@pytest.mark.parametrize("reply", [(400, {}), (200, b"<html>"), (200, [1]), (200, b"[" * 100_000), (200, b"")])
def test_an_unusable_answer_is_an_error_at_once(reply: Reply) -> None:
    with stub_service(lambda _: reply) as service:
        [answer] = ask(service)
    assert (answer.values, answer.status) == (None, "error")
    assert len(service.asked) == 1


def test_an_answer_without_end_is_an_error() -> None:
    with stub_service(lambda _: (200, b" " * (5 << 20))) as service:
        [answer] = ask(service)
    assert answer.status == "error"


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
        assert endpoint.usage.requests == 2
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
            endpoint.begin(Usage(requests=2, input_tokens=200, output_tokens=20), sharers=2)
            futures = [endpoint.submit("", {}) for _ in range(4)]
            assert [future.result().status for future in futures[:3]] == ["ok"] * 3
            with pytest.raises(LimitReached) as raised:
                futures[3].result()
            assert endpoint.usage == Usage(requests=5, input_tokens=500, output_tokens=50)
        assert len(service.asked) == 3
    assert raised.value.key == key


def test_the_key_comes_from_the_environment_and_shows_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with stub_service(lambda _: (401, {"error": "who are you?"})) as service:
        [answer] = ask(service, api_key="JUDGE_KEY")
    assert service.asked[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(answer)


@pytest.mark.parametrize("url", [None, "", "ftp://host/", "judge", "http://", "http://user:s3cret@host/v1"])
def test_a_url_that_is_none_is_refused_without_its_password(url: str | None) -> None:
    with pytest.raises(InputError) as raised:
        Endpoint(EndpointConfig.model_construct(url=url, api_key=None), 1.0, PRICES)
    assert raised.value.key == "scoring.endpoint.url"
    assert "s3cret" not in str(raised.value)


def test_a_key_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InputError) as raised:
        Endpoint(EndpointConfig(url="http://127.0.0.1/v1", api_key="JUDGE_KEY"), 1.0, PRICES)
    assert raised.value.key == "scoring.endpoint.api_key"


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
