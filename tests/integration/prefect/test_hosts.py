"""One campaign on three hosts, joined by a network that fails: controller and stores here, a work pool on each other.

here: Prefect server, controller, Ceph ──┬── host-N-2: generator, scorer
                                         └── host-N-3: trainer, sync_weights ──broadcast──► host-N-2
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced, healthy, stages_of, wait_until
from support.campaigns.network import Host, NoNetwork, network
from support.campaigns.prefect_server import has_worker, prefect_client
from support.stores.ceph import CephUnavailable, running_ceph

from flows.deployment.server import free_port
from millrace.runs.status import StatusReader
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.ceph, pytest.mark.faults, pytest.mark.timeout(1500)]

AUTH = "engineer:sesame"


@dataclass
class Site:
    """What a person has set up before the campaign starts."""

    generating: Host
    training: Host
    root: str
    api: str
    millrace: Millrace
    environment: dict[str, str]
    logs: Path

    def worker(self, host: Host, pool: str, **options: object) -> subprocess.Popen[str]:
        """`make host POOL=…` on that host."""
        with (self.logs / f"{host.name}-{time.monotonic():.0f}.log").open("w") as log:
            return host.start(
                sys.executable, "-m", "flows.deployment.host", pool,
                cwd=REPOSITORY, env=self.environment, stdout=log, stderr=log, **options,
            )  # fmt: skip

    def wait_for_worker(self, pool: str) -> None:
        user, _, password = AUTH.partition(":")
        with prefect_client(self.api, (user, password)) as client:
            wait_until(lambda: has_worker(client, pool), f"a worker of {pool} to be online")

    def campaign(self, run_id: str, **settings: object) -> list[str]:
        placed = {
            "placement.generate.work_pool": "generating",
            "placement.score.work_pool": "generating",
            "placement.train.work_pool": "training",
            "weights.transport": "broadcast",
            "weights.host": self.training.address,
        }
        return self.millrace.campaign(run_id, root=self.root, **placed, **settings)

    def steps(self, run_id: str) -> int:
        try:
            steps: int = StatusReader(open_store(f"{self.root}/{run_id}")).look()["steps"]
        except FileNotFoundError:
            return 0
        return steps


@pytest.fixture
def site(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with ExitStack() as stack:
        try:
            here, generating, training = stack.enter_context(network(2))
            ceph = stack.enter_context(running_ceph(tmp_path / "ceph", here.address))
        except (NoNetwork, CephUnavailable) as error:
            pytest.skip(str(error))
        port = free_port()
        mine = {
            **environment,
            **ceph.environment,
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_API_URL": f"http://{here.address}:{port}/api",
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_SERVER_API_AUTH_STRING": AUTH,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        for name, value in ceph.environment.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", here.address, "--port", str(port)]
        server = subprocess.Popen(command, env=mine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        millrace = Millrace(tmp_path / "runs", mine)
        stack.callback(millrace.close)
        site = Site(
            generating=generating,
            training=training,
            root=f"s3://{ceph.make_bucket()}/runs",
            api=mine["PREFECT_API_URL"],
            millrace=millrace,
            environment=mine,
            logs=tmp_path,
        )
        wait_until(lambda: healthy(site.api), "the Prefect server to answer")
        yield site


@pytest.fixture(autouse=True)
def _folder_for_ceph(tmp_path: Path) -> None:
    (tmp_path / "ceph").mkdir()


def seconds_until(condition: Callable[[], bool], what: str) -> float:
    started = time.monotonic()
    wait_until(condition, what, 300)
    return time.monotonic() - started


def row(what: str, noticed: float, overcome: float | None) -> None:
    told = "–" if overcome is None else f"{overcome:.0f} s after it is back"
    print(f"| {what} | {noticed:.0f} s | {told} | 0 | exact |", flush=True)


def test_hosts_are_cut_off_and_switched_off_and_the_campaign_goes_on_until_its_ledger_is_exact(site: Site) -> None:
    site.worker(site.generating, "generating")
    site.worker(site.training, "training")
    site.wait_for_worker("generating")
    site.wait_for_worker("training")
    with (site.logs / "controller.log").open("w+") as output:
        controller = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.main", *site.campaign("three", **{"training.max_steps": 400})],
            cwd=REPOSITORY,
            env={**site.environment, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"},
            stdout=output,
            stderr=output,
        )
        log = site.logs / "controller.log"

        def more_steps(by: int) -> Callable[[], bool]:
            wanted = site.steps("three") + by
            return lambda: site.steps("three") >= wanted

        try:
            wait_until(more_steps(3), "three steps on three hosts", 300)
            site.generating.cut()
            noticed = seconds_until(lambda: "has been silent" in log.read_text(), "the silence to be noticed")
            site.generating.mend()
            overcome = seconds_until(more_steps(5), "steps after the link is mended")
            row("the generator's host is cut off, then back", noticed, overcome)

            lost = log.read_text().count("train-0 of work pool training")
            site.training.kill_all()
            noticed = seconds_until(
                lambda: log.read_text().count("train-0 of work pool training") > lost, "the loss to be noticed"
            )
            site.worker(site.training, "training")
            overcome = seconds_until(more_steps(3), "steps after the trainer's host is back")
            row("the trainer's host is switched off, then back", noticed, overcome)
            controller.kill()
            killed = time.monotonic()
            wait_until(lambda: stages_of(f"{site.root}/three") == [], "every stage on every host to end", 120)
            row("kill -9 of the controller: its hosts' stages drain", time.monotonic() - killed, None)
        finally:
            controller.kill()
            controller.wait()
    resumed = site.millrace.run(*site.campaign("three", **{"training.max_steps": site.steps("three") + 3}), "--resume")
    assert resumed.code == 0, resumed.output
    status = StatusReader(open_store(f"{site.root}/three")).look()
    assert status["state"] == "finished"
    assert_balanced(status)


def test_a_root_that_a_host_can_t_see_is_named_by_the_host(site: Site) -> None:
    hidden = site.millrace.root
    hidden.mkdir(exist_ok=True)
    site.worker(site.generating, "generating", hide=str(hidden))
    site.wait_for_worker("generating")
    ended = site.millrace.run(*site.millrace.campaign("unseen", **{"placement.score.work_pool": "generating"}))
    assert ended.code == 2, ended.output
    last = ended.output.strip().splitlines()[-1]
    host = site.generating.name
    assert last.startswith(f"millrace: score-0 of work pool generating: host {host} sees no attempt 0 of a run at")
    assert last.endswith("expected a storage.root that the controller and every host of placement share")
