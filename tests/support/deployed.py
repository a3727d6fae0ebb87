"""`make server` and `make deploy` as a person types them, each in a terminal of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from support.campaigns import REPOSITORY, healthy, quick, wait_until

from flows.server import free_port

_OVER = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass
class Terminal:
    """One `make` target in the foreground of a terminal; what it says goes to a file."""

    said: Path
    process: subprocess.Popen[bytes]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """As a Ctrl-C would: every process of the terminal gets the signal. SIGKILL if that is not enough."""
        os.killpg(self.process.pid, number)
        try:
            self.process.wait(timeout=90)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Site:
    """A Prefect server with its own database, and how to reach it."""

    folder: Path
    port: int = field(default_factory=free_port)
    password: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> httpx.Client:
        """A client that is let in."""
        auth = None if self.password is None else httpx.BasicAuth("admin", self.password)
        return httpx.Client(base_url=f"{self.url}/api", auth=auth, timeout=30)

    def environment(self, **more: str) -> dict[str, str]:
        """Nothing of the person's own Prefect is touched."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MAKE"))}
        return {**mine, "PREFECT_HOME": str(self.folder / "prefect"), "OMP_NUM_THREADS": "1", **more}

    def make(self, target: str, *words: str, **more: str) -> Terminal:
        """The environment is the one that runs the tests, so nothing is installed."""
        said = self.folder / f"{target}-{len(list(self.folder.glob('*.txt')))}.txt"
        python = Path(sys.executable).parent
        with said.open("xb") as out:
            process = subprocess.Popen(
                ["make", "--old-file=install", target, f"BIN={python}", f"PORT={self.port}", *words],
                cwd=REPOSITORY, env=self.environment(**more), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Terminal(said, process)

    @contextmanager
    def server(self) -> Iterator[None]:
        more = {} if self.password is None else {"PREFECT_SERVER_API_AUTH_STRING": f"admin:{self.password}"}
        terminal = self.make("server", **more)
        try:
            wait_until(lambda: healthy(f"{self.url}/api"), "the server of `make server` to be healthy")
            yield
        finally:
            terminal.stop()

    @contextmanager
    def worker(self, *words: str) -> Iterator[Terminal]:
        more = {} if self.password is None else {"PREFECT_API_AUTH_STRING": f"admin:{self.password}"}
        terminal = self.make("deploy", *words, **more)
        try:
            wait_until(
                lambda: "started!" in terminal.said.read_text() or terminal.process.poll() is not None,
                "the worker of `make deploy` to start",
            )
            assert terminal.process.poll() is None, terminal.said.read_text()
            yield terminal
        finally:
            if terminal.process.poll() is None:
                terminal.stop()

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/deployments/name/{name}").raise_for_status().json()
        return found

    def campaign(self, name: str, **settings: object) -> dict[str, Any]:
        """The parameters of a quick campaign of that name: the deployment's own, with a few changed."""
        parameters: dict[str, Any] = self.deployment("campaign/campaign")["parameters"]
        chosen = {**quick(), "name": name, "storage.root": str(self.folder / "runs"), **settings}
        for key, value in chosen.items():
            *sections, last = key.split(".")
            at = parameters["config"]
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = value
        return parameters

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Asks for a run, as the form's button does; returns the flow run's id.

        A server whose SQLite is locked for too long says so, and a person would press the button again.
        """
        url = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        asked = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        while (answer := self.api.post(url, json=asked)).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            time.sleep(1)
        assert answer.status_code == httpx.codes.CREATED, answer.text
        run: str = answer.json()["id"]
        return run

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/flow_runs/{flow_run}").raise_for_status().json()
        return found

    def state(self, flow_run: str) -> str:
        """The name of its state."""
        name: str = self.flow_run(flow_run)["state"]["name"]
        return name

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment, the first one first."""
        mine = {"deployments": {"id": {"any_": [self.deployment(deployment)["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self.api.post("/flow_runs/filter", json=mine).raise_for_status().json()
        return found

    def wait_until_over(self, flow_run: str, seconds: float = 240) -> dict[str, Any]:
        """Its last state."""
        wait_until(
            lambda: self.flow_run(flow_run)["state"]["type"] in _OVER, f"flow run {flow_run} to end", seconds, every=0.5
        )
        state: dict[str, Any] = self.flow_run(flow_run)["state"]
        return state
