"""An HTTP server in a thread that answers as a script says: for answers that a real S3 server gives once in a month."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.stores.s3_server import S3Server


@dataclass(frozen=True, kw_only=True)
class S3Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """One answer. Of its body only `sent` bytes are sent, then the connection is closed; None sends all of it.

    With `status` 0 the connection is reset instead of an answer.
    """

    status: int
    body: bytes = b""
    sent: int | None = None
    content_range: str = ""
    headers: Mapping[str, str] | None = None
    """All headers; None: those that every object has."""

    @classmethod
    def error(cls, status: int, code: str) -> "Reply":
        """An error in S3's words."""
        return cls(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())


Script = Reply | Callable[[str, str, bytes], Reply]
"""A reply, or what makes one of a request's method, path and body."""


@dataclass(frozen=True, kw_only=True)
class ScriptedS3(S3Server):
    """The last reply is given again and again."""

    replies: list[Script]
    asked: list[str] = field(default_factory=list)
    """Method, path and If-None-Match of each request so far."""

    def answer(self, request: S3Request) -> Reply:
        self.asked.append(f"{request.method} {request.path} {request.headers.get('if-none-match', '')}".rstrip())
        script = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return script if isinstance(script, Reply) else script(request.method, request.path, request.body)


@contextmanager
def serving(answer: Callable[[S3Request], Reply]) -> Iterator[str]:
    """The endpoint of a server that answers each request in a new thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = S3Request(method=self.command, path=self.path, headers=self.headers, body=body)
            reply = answer(request)
            if reply.status == 0:
                # Closing without lingering sends RST.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            self.send_response_only(reply.status)
            headers = reply.headers
            if headers is None:
                headers = {"ETag": '"x"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            if reply.content_range:
                headers = {**headers, "Content-Range": reply.content_range}
            for name, value in {"Content-Length": str(len(reply.body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body[: reply.sent])
            self.close_connection = reply.sent is not None

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def scripted_s3(*replies: Script) -> Iterator[ScriptedS3]:
    script = ScriptedS3(endpoint="", key="the-key", secret="the-secret", replies=list(replies))
    with serving(script.answer) as endpoint:
        object.__setattr__(script, "endpoint", endpoint)
        yield script
