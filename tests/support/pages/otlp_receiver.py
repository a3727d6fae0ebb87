"""A receiver of OpenTelemetry traces on this machine, which keeps what it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(kw_only=True)
class Receiver:
    """What it was sent; it answers each request with `code`."""

    url: str = ""
    code: int = 200
    resources: list[dict[str, Any]] = field(default_factory=list)
    """Attributes of the resource of each accepted request."""
    spans: list[Any] = field(default_factory=list)
    """Accepted spans, as OTLP's protocol buffers."""


def attributes_of(message: Any) -> dict[str, Any]:
    """The attributes of a span or a resource that are single values."""
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value"))
        for item in message.attributes
        if item.value.WhichOneof("value") != "array_value"
    }


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Starts a receiver and stops it at the end."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = receiver.code if self.path == "/v1/traces" else 404
            if code == 200:
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    receiver.resources.append(attributes_of(of_resource.resource))
                    receiver.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()
