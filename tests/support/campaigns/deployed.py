"""`make server` and `make deploy` as a person runs them, each in a separate terminal."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prefect.client.base import PrefectHttpxSyncClient
from support.campaigns.campaigns import BASE_INSTALL, REPOSITORY, healthy, quick, wait_until
from support.campaigns.prefect_server import prefect_client

from flows.deployment.server import free_port

_OVER = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass
class Terminal:
    """One `make` target in the foreground of a terminal."""

    output: Path
    process: subprocess.Popen[bytes]

    def child_pid(self) -> int:
        """The process that `make` started."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal to every process of the terminal, as Ctrl-C does, then SIGKILL if they do not end."""
        os.killpg(self.process.pid, number)
        try:
            self.process.wait(timeout=90)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Site:
    """A Prefect server with its own database."""

    folder: Path
    port: int = field(default_factory=free_port)
    password: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> PrefectHttpxSyncClient:
        auth = None if self.password is None else ("admin", self.password)
        return prefect_client(f"{self.url}/api", auth)

    def environment(self, **more: str) -> dict[str, str]:
        """Keeps the user's own Prefect settings and database out."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MAKE"))}
        return {**mine, **BASE_INSTALL, "PREFECT_HOME": str(self.folder / "prefect"), "OMP_NUM_THREADS": "1", **more}

    def make(self, target: str, *words: str, **more: str) -> Terminal:
        """Starts `make target` with the Python that runs the tests, so that it installs nothing."""
        output = self.folder / f"{target}-{len(list(self.folder.glob('*.txt')))}.txt"
        python = Path(sys.executable).parent
        with output.open("xb") as out:
            process = subprocess.Popen(
                ["make", "--old-file=install", target, f"BIN={python}", f"PORT={self.port}", *words],
                cwd=REPOSITORY, env=self.environment(**more), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Terminal(output, process)

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
                lambda: "started!" in terminal.output.read_text() or terminal.process.poll() is not None,
                "the worker of `make deploy` to start",
            )
            assert terminal.process.poll() is None, terminal.output.read_text()
            yield terminal
        finally:
            if terminal.process.poll() is None:
                terminal.stop()

    def deployment(self, name: str) -> dict[str, Any]:
        deployment: dict[str, Any] = self.api.get(f"/deployments/name/{name}").json()
        return deployment

    def campaign(self, name: str, **settings: object) -> dict[str, Any]:
        """The deployment's parameters, changed to a quick campaign of that name."""
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
        """Creates a run as the form's button does; returns the flow run's id."""
        url = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        run: str = self.api.post(url, json=body).json()["id"]
        return run

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        run: dict[str, Any] = self.api.get(f"/flow_runs/{flow_run}").json()
        return run

    def state(self, flow_run: str) -> str:
        name: str = self.flow_run(flow_run)["state"]["name"]
        return name

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment, oldest first."""
        mine = {"deployments": {"id": {"any_": [self.deployment(deployment)["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
        runs: list[dict[str, Any]] = self.api.post("/flow_runs/filter", json=mine).json()
        return runs

    def wait_until_over(self, flow_run: str, seconds: float = 240) -> dict[str, Any]:
        """Returns the flow run's final state."""
        wait_until(
            lambda: self.flow_run(flow_run)["state"]["type"] in _OVER, f"flow run {flow_run} to end", seconds, every=0.5
        )
        state: dict[str, Any] = self.flow_run(flow_run)["state"]
        return state
