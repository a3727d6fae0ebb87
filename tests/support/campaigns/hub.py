"""A hub of Hugging Face on loopback: the four requests that downloads are made of."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Repositories = dict[str, Mapping[str, bytes]]
"""Files by name of each repository: `ORG/NAME`, of data sets `datasets/ORG/NAME`."""


class Hub:
    """The content of the hub, and the files that it served."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: Repositories = {}
        self.gated: set[str] = set()
        self.given: list[str] = []

    def revision(self, name: str) -> str:
        """The commit of a repository: another one when a file changes."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub without repositories, at `hub.url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/")
            if path.startswith("api/"):
                kind, organisation, name, *rest = [*path.removeprefix("api/").split("/"), "", ""]
                repository = ("" if kind == "models" else f"{kind}/") + f"{organisation}/{name}"
                self._tell(repository, listing=rest[:1] == ["tree"])
            else:
                repository, _, rest = path.partition("/resolve/")
                self._give(repository, rest.partition("/")[2])

        do_HEAD = do_GET

        def _tell(self, repository: str, listing: bool) -> None:
            if repository not in hub.repositories:
                self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
                return
            if repository in hub.gated:
                self._answer(403, headers={"X-Error-Code": "GatedRepo"})
                return
            files = hub.repositories[repository]
            about: object = {
                "id": repository.removeprefix("datasets/"),
                "sha": hub.revision(repository),
                "siblings": [{"rfilename": name} for name in files],
            }
            if listing:
                about = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            self._answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

        def _give(self, repository: str, name: str) -> None:
            data = hub.repositories[repository][name]
            if self.command == "GET":
                hub.given.append(name)
            tag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": hub.revision(repository)})

        def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Keeps the tests' output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
