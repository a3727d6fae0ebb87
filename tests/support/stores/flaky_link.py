"""A link to an S3 server that loses requests and replies, cuts replies off, and flips bits of stored files.

    client ──request──► link ──────────────────► server
              lost_request: reset ─┘               │
    client ◄────────── link ◄───────reply──────────┘
                        └─ lost_reply: reset;  cut_reply: without its last byte;  flipped: one bit

A link draws the fate of each request by its seed. Only files with a checksum are flipped: an error or a
list of names has none. Each is flipped once at most, because a file that is damaged twice counts as damaged.
"""

import http.client
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from support.stores.scripted_s3 import Reply, S3Request, serving

STORM = {"lost_request": 0.01, "lost_reply": 0.01, "cut_reply": 0.01, "flipped": 0.1}
"""Chance of each request; of being flipped, that of each request that reads a checksummed file."""
_CHECKSUMMED = re.compile(r"/(seg|data)/")
_RESET = Reply(0)


class FlakyLink:
    """The link at `endpoint`, and how often each fault has struck."""

    def __init__(self, server: str, seed: int, rates: Mapping[str, float]) -> None:
        self._server = urlsplit(server)
        self._rates = rates
        self._next: list[str] = []
        self._flipped: set[str] = set()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.fired: Counter[str] = Counter()
        self.requests = 0
        self.endpoint = ""

    def strike_next(self, fault: str) -> None:
        """The next request meets this fault."""
        self._next.append(fault)

    def answer(self, request: S3Request) -> Reply:
        with self._lock:
            fault = self._draw_fault(request)
        if fault == "lost_request":
            reply = _RESET
        else:
            reply = self._forward(request)
            if fault == "lost_reply" or (fault == "cut_reply" and not reply.body):
                reply = _RESET
            elif fault == "cut_reply":
                reply = Reply(reply.status, reply.body, sent=len(reply.body) - 1, headers=reply.headers)
            elif fault == "flipped":
                if reply.status not in (200, 206) or not reply.body:
                    return reply
                body = reply.body[:-1] + bytes([reply.body[-1] ^ 1])
                reply = Reply(reply.status, body, headers=reply.headers)
        if fault:
            with self._lock:
                self.fired[fault] += 1
        return reply

    def _draw_fault(self, request: S3Request) -> str:
        """The fault that strikes this request, or an empty string."""
        self.requests += 1
        if self._next:
            return self._next.pop(0)
        path = request.path
        may_flip = request.method == "GET" and _CHECKSUMMED.search(path) and path not in self._flipped
        for fault, rate in self._rates.items():
            if (fault != "flipped" or may_flip) and self._random.random() < rate:
                if fault == "flipped":
                    self._flipped.add(path)
                return fault
        return ""

    def _forward(self, request: S3Request) -> Reply:
        """Headers are passed on unchanged: the client's signature covers them."""
        connection = http.client.HTTPConnection(str(self._server.hostname), self._server.port, timeout=60)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                connection.putheader(name, value)
            connection.endheaders(request.body)
            reply = connection.getresponse()
            dropped = {"transfer-encoding", "connection"} | (set() if request.method == "HEAD" else {"content-length"})
            headers = {name: value for name, value in reply.getheaders() if name.lower() not in dropped}
            return Reply(reply.status, reply.read(), headers=headers)
        except OSError:
            return _RESET
        finally:
            connection.close()


@contextmanager
def flaky_link(to: str, seed: int, rates: Mapping[str, float]) -> Iterator[FlakyLink]:
    """A link to the server at the endpoint `to`."""
    link = FlakyLink(to, seed, rates)
    with serving(link.answer) as endpoint:
        link.endpoint = endpoint
        yield link
