"""A service on loopback that answers as a test says, and remembers what it was asked.

python -m tests.support.rewards.stub_service --seconds 1.0    a judge that takes a second, for benchmarks
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status and body: JSON, or bytes as they are."""


@dataclass
class Asked:
    """A request that came in."""

    body: dict[str, Any]
    headers: dict[str, str]
    t: float
    """When, monotonic seconds."""


@dataclass
class StubService:
    """What `url` answers is what `answer` returns for each request's JSON; it may take its time, or raise."""

    answer: Callable[[dict[str, Any]], Reply]
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    reply_headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._at_once = 0

    def reply(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        """Remembers a request and answers it."""
        with self._lock:
            self.asked.append(Asked(body, headers, time.monotonic()))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(body)
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def stub_service(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[StubService]:
    """Serves on a free port of loopback."""
    service = StubService(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, reply = service.reply(body, {name.lower(): value for name, value in self.headers.items()})
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **service.reply_headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_: object) -> None:
            """A client that gave up is no error of the service."""

    server = Server(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def graded(grade: Callable[[str, str], float]) -> Callable[[dict[str, Any]], Reply]:
    """A judge that grades each response by its reference answer."""

    def answer(body: dict[str, Any]) -> Reply:
        document = json.loads(body["messages"][1]["content"])
        grades = [grade(response, document["reference_answer"]) for response in document["responses"]]
        return 200, judged(json.dumps({"grades": grades}))

    return answer


def judged(text: str) -> dict[str, Any]:
    """A chat completion with this text, of 100 tokens read and 10 written."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0)
    seconds = parser.parse_args().seconds

    def slowly(body: dict[str, Any]) -> Reply:
        time.sleep(seconds)
        return graded(lambda response, expected: 10.0 * (expected in response))(body)

    with stub_service(slowly) as running:
        print(running.url, flush=True)
        threading.Event().wait()
