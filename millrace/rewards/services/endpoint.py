"""Asks a service over HTTP for many answers at once, within its limits.

    submit ─► a slot (in_flight) ─► a turn (requests per minute) ─► POST ─► a JSON object, or why there is none
                                     ▲                                │ 408, 429, 5xx, connection lost
                                     └──────── pause, with jitter ◄───┘

All requests run in one thread with an event loop. Answers are hostile: their size and depth are bounded, whatever goes
wrong with one is an error of that one, and the key is replaced in all text that comes from the service.
"""

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from threading import Thread
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from configs.task import EndpointConfig
from millrace.errors import InputError
from millrace.rewards.base import ScoreStatus
from millrace.rewards.services.meter import LimitReached, Meter, Prices, Usage

_TRANSIENT = frozenset(map(str, (408, 429, *range(500, 600))))
_LONGEST_ANSWER = 4 << 20
"""Bytes."""
_DEEPEST_ANSWER = 100
"""Levels of nested lists and objects. Answers are stored, and JSON's encoder recurses."""
_MOST_TOKENS = 10**9
"""Per answer."""
_SHORTEST_SECRET = 6
"""Characters. A shorter key is a placeholder, and may be part of any word."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The outcome of a request."""

    values: Mapping[str, Any] | None
    """The JSON object; None unless `status` is `ok`."""
    status: ScoreStatus = "ok"
    error: str | None = None
    """Why the answer is missing."""
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
        self.meter = Meter(config, prices)
        self._config, self._timeout, self._key = config, timeout_seconds, _key(config.api_key)
        self._next_turn = 0.0

    def open(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self._config.in_flight)
        # A few compressed kilobytes can unpack to gigabytes.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
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
            status: ScoreStatus = "error"
            try:
                values = await self._attempts(url, body)
                return Answer(values=values, seconds=time.monotonic() - started)
            except LimitReached:
                raise
            except TimeoutError:
                status, reason = "timeout", f"no answer in {self._timeout:g} s"
            except _EndpointError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 — a service can make a library raise anything
                reason = f"{type(error).__name__}: {error}"
            reason = self._without_key(reason)
            return Answer(values=None, status=status, error=reason, seconds=time.monotonic() - started)

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
        """Waits for the rate limit. This time does not count towards the service's timeout. Raises LimitReached."""
        if self._config.requests_per_minute is not None:
            now, end = self._loop.time(), deadline.when()
            assert end is not None
            turn = max(now, self._next_turn)
            self._next_turn = turn + 60 / self._config.requests_per_minute
            deadline.reschedule(None)
            await asyncio.sleep(turn - now)
            deadline.reschedule(self._loop.time() + end - now)
        self.meter.count_request()

    async def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = bytearray()
        try:
            async with next(self._next_client).stream("POST", url, content=json.dumps(body)) as response:
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > _LONGEST_ANSWER:
                        raise _EndpointError(f"an answer of more than {_LONGEST_ANSWER:,} bytes")
        except httpx.TransportError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        return self._answer(response, self._read(content))

    def _answer(self, response: httpx.Response, answer: Any) -> dict[str, Any]:
        """Counts the tokens of `answer` and returns it. Raises an error that shows its beginning if it is unusable."""
        shown = (answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))[:200]
        status, error = response.status_code, answer.get("error") if isinstance(answer, dict) else None
        if error or not response.is_success:
            code = error.get("code") if response.is_success and isinstance(error, dict) else status
            reason = f"status {status}: {shown}"
            raise _Transient(reason, _retry_after(response)) if str(code) in _TRANSIENT else _EndpointError(reason)
        if not isinstance(answer, dict):
            encoding = response.headers.get("content-encoding", "identity")[:20]
            raise _EndpointError(f"an answer that is not a JSON object, with content encoding {encoding}: {shown}")
        self.meter.count_tokens(_tokens(answer))
        return answer

    def _read(self, content: bytearray) -> Any:
        """The JSON of an answer, else its text."""
        try:
            # Python's int refuses a text of thousands of digits, which would cost all rows of an answer.
            return self._without_key(json.loads(content, parse_int=lambda n: int(n) if len(n) < 400 else float(n)))
        except (ValueError, RecursionError):
            return self._without_key(content.decode(errors="replace"))

    def _without_key(self, value: Any, levels: int = _DEEPEST_ANSWER) -> Any:
        """Plain JSON without the key in it. Raises ValueError if it is nested deeper than `levels`."""
        if levels < 0:
            raise ValueError("nested too deep")
        match value:
            case str() if len(self._key) >= _SHORTEST_SECRET:
                return value.replace(self._key, "(API key)")
            case list():
                return [self._without_key(item, levels - 1) for item in value]
            case dict():
                return {self._without_key(k, levels - 1): self._without_key(v, levels - 1) for k, v in value.items()}
        return value


def _tokens(answer: Mapping[str, Any]) -> Usage | None:
    """The tokens that an OpenAI-compatible answer counts; None if it doesn't."""
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    read, written = counts.get("prompt_tokens"), counts.get("completion_tokens")
    if not (type(read) is type(written) is int and 0 < read <= _MOST_TOKENS and 0 <= written <= _MOST_TOKENS):
        return None
    return Usage(input_tokens=read, output_tokens=written)


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt: the service's own figure at least, and a random time whose bound doubles."""
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
    with suppress(httpx.InvalidURL, ValueError):
        url = httpx.URL(text or "")
        has_port = url.port is None or 0 < url.port < 2**16
        if url.scheme in ("http", "https") and url.host and has_port and not url.userinfo:
            return str(url).rstrip("/")
    # A password must not get into a message, even if it makes the URL unreadable.
    read = "null" if text is None else f'"{"…@" if "@" in text else ""}{text.rpartition("@")[2]}"'
    expected = "an http or https URL without user and password"
    raise InputError(read, key="scoring.endpoint.url", expected=expected)


def _key(variable: str | None) -> str:
    """The API key, "" for none. Raises InputError, which does not show it."""
    if variable is None:
        return ""
    key, expected = "scoring.endpoint.api_key", "the name of an environment variable with the key"
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", variable):
        raise InputError("not a variable's name, and not shown because it may be the key", key=key, expected=expected)
    # Files and command substitutions end with a newline.
    if not (value := os.environ.get(variable, "").strip()):
        raise InputError(f'"{variable}", which is not set', key=key, expected=expected)
    if not re.fullmatch("[!-~]+", value):
        raise InputError(f'"{variable}", whose value has other characters', key=key, expected="a key of visible ASCII")
    return value
