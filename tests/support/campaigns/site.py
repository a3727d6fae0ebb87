"""Several hosts as a person has set them up before a campaign: a network, a Prefect server with a password, Ceph.

here: Prefect server, controller, Ceph ──┬── host-N-2
                                         └── host-N-3, …   `make host POOL=…` on each
"""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, healthy, wait_until
from support.campaigns.network import Host, NoNetwork, network
from support.campaigns.prefect_server import num_workers, prefect_client
from support.stores.ceph import CephUnavailable, running_ceph

from flows.deployment.server import free_port
from millrace.runs.status import StatusReader
from storage.stores.base import Store
from storage.stores.factory import open_store

AUTH = "engineer:sesame"
_PAGE = 200
"""Most log lines that the Prefect server returns at once."""


@dataclass
class HostsSite:
    """Several hosts, and what runs on this machine."""

    hosts: list[Host]
    """Without this machine."""
    root: str
    api: str
    millrace: Millrace
    environment: dict[str, str]
    logs: Path
    messages: dict[str, str] = field(default_factory=dict)
    """Log lines seen so far, by their ids."""

    def worker(self, host: Host, pool: str, *flags: str, **options: object) -> subprocess.Popen[str]:
        """`make host POOL=…` on that host."""
        with (self.logs / f"{host.name}-{time.monotonic():.0f}.log").open("w") as log:
            return host.start(
                sys.executable, "-m", "flows.deployment.deploy", "--host", pool, *flags,
                cwd=REPOSITORY, env=self.environment, stdout=log, stderr=log, **options,
            )  # fmt: skip

    def wait_for_workers(self, pool: str, number: int = 1) -> None:
        with prefect_client(self.api, self.auth) as client:
            wait_until(lambda: num_workers(client, pool) >= number, f"{number} workers of {pool} to be online")

    @property
    def auth(self) -> tuple[str, str]:
        user, _, password = AUTH.partition(":")
        return user, password

    def count_logged(self, sentence: str) -> int:
        """How many log lines of all flow runs on all hosts begin with this sentence."""
        with prefect_client(self.api, self.auth) as client:
            # The server returns 200 lines at a time, the newest first; a long campaign writes more.
            for offset in itertools.count(step=_PAGE):
                page = {"limit": _PAGE, "offset": offset, "sort": "TIMESTAMP_DESC"}
                lines = {line["id"]: line["message"] for line in client.post("/logs/filter", json=page).json()}
                seen_before = lines.keys() & self.messages.keys()
                self.messages |= lines
                if seen_before or len(lines) < _PAGE:
                    break
        return sum(message.startswith(sentence) for message in self.messages.values())

    def start(self, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
        """The controller of a campaign, here, and its log."""
        log = self.logs / "controller.log"
        with log.open("w") as output:
            controller = subprocess.Popen(
                [sys.executable, "-m", "flows.cli.main", *arguments],
                cwd=REPOSITORY,
                env={**self.environment, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"},
                stdout=output,
                stderr=output,
                text=True,
            )
        return controller, log

    def store(self, run_id: str) -> Store:
        return open_store(f"{self.root}/{run_id}")

    def steps(self, run_id: str) -> int:
        try:
            steps: int = StatusReader(self.store(run_id)).look()["steps"]
        except FileNotFoundError:
            return 0
        return steps

    def wait_for_steps(self, run_id: str, by: int, what: str) -> float:
        """Waits for `by` more steps. Returns how long they took, in seconds."""
        began, target = time.monotonic(), self.steps(run_id) + by
        wait_until(lambda: self.steps(run_id) >= target, what, 300)
        return time.monotonic() - began


@contextmanager
def made_site(folder: Path, environment: dict[str, str], num_hosts: int) -> Iterator[HostsSite]:
    """A site of `num_hosts` hosts and this machine, with all files in `folder`. Skips the test where it can't be made.

    The keys of its store become environment variables of this process too.
    """
    (folder / "ceph").mkdir()
    with ExitStack() as stack:
        try:
            here, *hosts = stack.enter_context(network(num_hosts))
            ceph = stack.enter_context(running_ceph(folder / "ceph", here.address))
        except (NoNetwork, CephUnavailable) as error:
            pytest.skip(str(error))
        port = free_port()
        mine = {
            **environment,
            **ceph.environment,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://{here.address}:{port}/api",
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_SERVER_API_AUTH_STRING": AUTH,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in ceph.environment.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", here.address, "--port", str(port)]
        server = subprocess.Popen(command, env=mine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        millrace = Millrace(folder / "runs", mine)
        stack.callback(millrace.close)
        site = HostsSite(
            hosts=hosts,
            root=f"s3://{ceph.make_bucket()}/runs",
            api=mine["PREFECT_API_URL"],
            millrace=millrace,
            environment=mine,
            logs=folder,
        )
        wait_until(lambda: healthy(site.api), "the Prefect server to answer")
        yield site
