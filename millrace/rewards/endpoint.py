"""Asks a service over HTTP for many answers at once, within its limits.

    submit ─► a slot (in_flight) ─► a turn (requests per minute) ─► POST ─► a JSON object, or why there is none
                                     ▲                                │ 408, 429, 5xx, connection lost
                                     └──────── pause, with jitter ◄───┘

All requests run in one thread with an event loop.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from threading import Lock, Thread
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from configs.task import EndpointConfig
from millrace.errors import InputError
from millrace.rewards.base import ScoreStatus

_TRANSIENT = frozenset({408, 429, *range(500, 600)})
_LONGEST_ANSWER = 4 << 20
"""Bytes."""
_LONGEST_PAUSE = 30.0
_SLOTS_PER_CLIENT = 16
"""A client of httpx looks at all of its connections for each request."""


class _EndpointError(RuntimeError):
    """The service gave no usable answer."""


class _Transient(_EndpointError):
    """Another attempt may succeed, after `pause` seconds if the service said so."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class LimitReached(InputError):
    """A configured limit of requests or cost allows no further request; `pauses` says that the run waits then."""

    pauses = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What was asked of a service."""

    requests: int = 0
    """Attempts, also those that failed."""
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What tokens cost, per million."""

    input: float = 0.0
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        """In the prices' currency."""
        return (usage.input_tokens * self.input + usage.output_tokens * self.output) / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a request."""

    values: Mapping[str, Any] | None
    """The JSON object; None unless `status` is `ok`."""
    status: ScoreStatus = "ok"
    error: str | None = None
    """Why there is no answer."""
    seconds: float = 0.0
    """From its first attempt to the answer."""
    t: float = field(default_factory=time.time)
    """When it came, unix seconds; by default, when this object was made."""


class Endpoint:
    """A client of the service in `config`; `timeout_seconds` is the limit for a request with all its attempts.

    Raises InputError for a URL or a key that can't be used.
    """

    def __init__(self, config: EndpointConfig, timeout_seconds: float, prices: Prices) -> None:
        self.url = _checked_url(config.url)
        self.prices = prices
        self._config, self._timeout, self._headers = config, timeout_seconds, _headers(config.api_key)
        self._lock = Lock()
        self._usage = Usage()
        self._sharers = 1
        self._next_turn = 0.0

    @property
    def usage(self) -> Usage:
        """What was asked so far, predecessors of this process included."""
        with self._lock:
            return self._usage

    def begin(self, usage: Usage, sharers: int) -> None:
        """Counts from `usage` on, what predecessors of this process asked; `sharers` processes share the limits."""
        with self._lock:
            self._usage, self._sharers = usage, sharers

    def open(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self._config.in_flight)
        headers = {"Content-Type": "application/json", **self._headers}
        self._clients = [
            httpx.AsyncClient(headers=headers, timeout=None)
            for _ in range(math.ceil(self._config.in_flight / _SLOTS_PER_CLIENT))
        ]
        self._next_client = cycle(self._clients)
        self._thread = Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives up the requests in flight and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    def submit(self, path: str, body: Mapping[str, Any]) -> "Future[Answer]":
        """Posts JSON to `path` below the URL. The future raises LimitReached alone; `close` cancels it."""
        return asyncio.run_coroutine_threadsafe(self._ask(self.url + path, body), self._loop)

    async def _ask(self, url: str, body: Mapping[str, Any]) -> Answer:
        async with self._slots:
            started = time.monotonic()
            try:
                values = await self._attempts(url, body)
            except _EndpointError as error:
                return Answer(values=None, status="error", error=str(error), seconds=time.monotonic() - started)
            except TimeoutError:
                reason = f"no answer in {self._timeout:g} s"
                return Answer(values=None, status="timeout", error=reason, seconds=time.monotonic() - started)
            return Answer(values=values, seconds=time.monotonic() - started)

    async def _attempts(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._config.attempts),
            wait=_pause,
            retry=retry_if_exception_type(_Transient),
            reraise=True,
        )
        async with asyncio.timeout(self._timeout) as deadline:
            async for attempt in retrying:
                with attempt:
                    await self._turn(deadline)
                    return await self._post(url, body)
        raise AssertionError("each attempt returns or raises")

    async def _turn(self, deadline: asyncio.Timeout) -> None:
        """Waits for a turn, which is no time of the service. Raises LimitReached."""
        if self._config.requests_per_minute is not None:
            now, end = self._loop.time(), deadline.when()
            assert end is not None
            turn = max(now, self._next_turn)
            self._next_turn = turn + 60 / self._config.requests_per_minute
            deadline.reschedule(None)
            await asyncio.sleep(turn - now)
            deadline.reschedule(self._loop.time() + end - now)
        with self._lock:
            usage, limits = self._usage, self._config
            if limits.max_requests is not None and usage.requests >= limits.max_requests / self._sharers:
                raise self._limit_reached("max_requests", limits.max_requests, f"{usage.requests:,} requests")
            cost = self.prices.cost(usage)
            if limits.max_cost is not None and cost >= limits.max_cost / self._sharers:
                raise self._limit_reached("max_cost", limits.max_cost, f"a cost of {cost:.4g}")
            self._usage += Usage(requests=1)

    def _limit_reached(self, key: str, limit: float, asked: str) -> LimitReached:
        read = f"{limit:,g}, and this process's share is used up by {asked}"
        error = LimitReached(read, key=f"scoring.endpoint.{key}", expected="a higher limit to go on")
        error.pauses = self._config.at_limit == "pause"
        return error

    async def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = bytearray()
        try:
            async with next(self._next_client).stream("POST", url, content=json.dumps(body)) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > _LONGEST_ANSWER:
                        raise _EndpointError(f"an answer of more than {_LONGEST_ANSWER:,} bytes")
        except httpx.TransportError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        start = content[:200].decode(errors="replace")
        if response.status_code in _TRANSIENT:
            raise _Transient(f"status {response.status_code}: {start}", _retry_after(response))
        if not response.is_success:
            raise _EndpointError(f"status {response.status_code}: {start}")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _EndpointError(f"an answer that is not JSON: {start}") from error
        if not isinstance(answer, dict):
            raise _EndpointError(f"an answer that is not a JSON object: {start}")
        with self._lock:
            self._usage += _tokens(answer)
        return answer


def _tokens(answer: Mapping[str, Any]) -> Usage:
    """The tokens that an OpenAI-compatible answer counts; none if it doesn't."""
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    read, written = counts.get("prompt_tokens"), counts.get("completion_tokens")
    if not isinstance(read, int) or not isinstance(written, int):
        return Usage()
    return Usage(input_tokens=max(0, read), output_tokens=max(0, written))


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt: at least what the service asked for, and a random time whose bound doubles."""
    assert state.outcome is not None
    error = state.outcome.exception()
    asked = error.pause if isinstance(error, _Transient) else None
    return (asked or 0.0) + wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE)(state)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        # A date, or nothing.
        return None


def _checked_url(text: str | None) -> str:
    key, expected = "scoring.endpoint.url", "an http or https URL without user and password"
    try:
        url = httpx.URL(text or "")
    except httpx.InvalidURL as error:
        raise InputError(f'"{text}"', key=key, expected=expected) from error
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        # A password must not get into a message.
        read = "null" if text is None else f'"{url.copy_with(userinfo=b"")}"'
        raise InputError(read, key=key, expected=expected)
    return str(url).rstrip("/")


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "")):
        expected = "an environment variable with the key"
        raise InputError(f'"{variable}", which is not set', key="scoring.endpoint.api_key", expected=expected)
    return {"Authorization": f"Bearer {key}"}
