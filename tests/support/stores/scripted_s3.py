"""A server that answers as it was told to, whatever is asked: for the answers a real one gives once in a month."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.stores.s3_server import S3Server


@dataclass(frozen=True)
class Reply:
    """One answer. Of its body only `sent` bytes are sent, then the connection is closed; None sends all of it.

    With `status` 0 the connection is reset instead of an answer.
    """

    status: int
    body: bytes = b""
    sent: int | None = None
    content_range: str = ""

    @classmethod
    def error(cls, status: int, code: str) -> "Reply":
        """As S3 words it."""
        return cls(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())


Script = Reply | Callable[[str, str, bytes], Reply]
"""A reply, or what makes one of a request's method, path and body."""


@dataclass(frozen=True, kw_only=True)
class ScriptedS3(S3Server):
    """The last reply is given again and again."""

    replies: list[Script]
    asked: list[str] = field(default_factory=list)
    """Method, path and If-None-Match of each request so far."""


@contextmanager
def scripted_s3(*replies: Script) -> Iterator[ScriptedS3]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            script.asked.append(f"{self.command} {self.path} {self.headers.get('if-none-match', '')}".rstrip())
            told = script.replies.pop(0) if len(script.replies) > 1 else script.replies[0]
            reply = told if isinstance(told, Reply) else told(self.command, self.path, body)
            if reply.status == 0:
                # Closing without lingering sends RST.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            if reply.content_range:
                self.send_header("Content-Range", reply.content_range)
            for name, value in (("ETag", '"x"'), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body[: reply.sent])
            self.close_connection = reply.sent is not None

        do_GET = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script = ScriptedS3(
        endpoint=f"http://127.0.0.1:{server.server_port}", key="the-key", secret="the-secret", replies=list(replies)
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
