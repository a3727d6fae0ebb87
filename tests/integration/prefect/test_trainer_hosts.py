"""A trainer over two hosts, with a generator on a third: hosts are lost and come back, and the ledger is exact.

here: Prefect server, controller, Ceph ──┬── host-N-2: generator, scorer
                                         ├── host-N-3: rank 0, sync_weights ◄═╗ gloo
                                         └── host-N-4: rank 1 ◄═══════════════╝

Weights reach the generator through the store, or straight from the ranks.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import assert_balanced, wait_until
from support.campaigns.network import Host
from support.campaigns.site import HostsSite, made_site

from millrace.runs.status import StatusReader
from storage.progress import read_status

pytestmark = [pytest.mark.campaign, pytest.mark.ceph, pytest.mark.faults, pytest.mark.timeout(1500)]

RUN = "ranks"
ALL, FEWER = "the trainer starts on 2 hosts: ", "the trainer starts on 1 of 2 hosts, "


@pytest.fixture
def site(tmp_path: Path, environment: dict[str, str]) -> Iterator[HostsSite]:
    with made_site(tmp_path, environment, 3) as site:
        yield site


def campaign(site: HostsSite, **settings: object) -> list[str]:
    network = site.hosts[0].network
    placed = {
        "placement.generate.work_pool": "generating",
        "placement.score.work_pool": "generating",
        "placement.train.work_pool": "training",
        "placement.train.hosts": 2,
        "placement.train.min_hosts": 1,
        "placement.train.network": f"10.93.{network}.0/24",
        "training.parallel.data": 2,
        "weights.transport": "store",
    }
    return site.millrace.campaign(RUN, root=site.root, **{**placed, **settings})


def host_of_job(site: HostsSite, number: int) -> Host:
    """The host that runs job `number` of the trainer."""
    doing = read_status(site.store(RUN), "place-train", number)["doing"]
    return next(host for host in site.hosts if doing == f"on {host.name}")


class Starts:
    """The starts of the trainer, as its launchers log them."""

    def __init__(self, site: HostsSite) -> None:
        self._site = site
        self._seen = dict.fromkeys((ALL, FEWER), 0)

    def seconds_until(self, sentence: str) -> float:
        """Waits for a start of this kind that was not there at the last call."""
        began = time.monotonic()
        wait_until(lambda: self._site.count_logged(sentence) > self._seen[sentence], f"{sentence!r}", 300, every=1.0)
        self._seen = {kind: self._site.count_logged(kind) for kind in self._seen}
        return time.monotonic() - began


def row(what: str, seconds: float) -> None:
    print(f"| {what} | {seconds:.0f} s |", flush=True)


@pytest.mark.parametrize("transport", ["store", "direct"])
def test_a_trainer_survives_hosts_that_are_cut_off_switched_off_and_come_back(transport: str, site: HostsSite) -> None:
    generating, *training = site.hosts
    site.worker(generating, "generating")
    for host in training:
        site.worker(host, "training", "--limit", "1")
    site.wait_for_workers("generating")
    site.wait_for_workers("training", 2)
    controller, log = site.start(*campaign(site, **{"training.max_steps": 2000, "weights.transport": transport}))
    starts = Starts(site)
    try:
        # With fewer at first, if one of the workers is slow.
        starts.seconds_until(ALL)
        site.wait_for_steps(RUN, 3, "three steps on three hosts")
        first, second = host_of_job(site, 0), host_of_job(site, 1)
        assert {first.name, second.name} == {host.name for host in training}, "each host has one of the jobs"
        assert site.count_logged(f"{ALL}{first.address}, {second.address}") == 1

        second.cut()
        row("a host without rank 0 is cut off: the rest go on", starts.seconds_until(FEWER))
        site.wait_for_steps(RUN, 3, "steps on the host that is left")
        second.mend()
        row("it is back: all hosts go on", starts.seconds_until(ALL))
        site.wait_for_steps(RUN, 3, "steps on both hosts again")

        first.kill_all()
        row("the host of rank 0 is switched off: the rest go on", starts.seconds_until(FEWER))
        site.wait_for_steps(RUN, 3, "steps on the other host")
        assert host_of_job(site, 0) == second, "the other host has given its place to the job of rank 0"
        site.worker(first, "training", "--limit", "1")
        row("it is back: all hosts go on", starts.seconds_until(ALL))
        site.wait_for_steps(RUN, 3, "steps on both hosts at the end")
        controller.terminate()
        assert controller.wait(120) == 143, log.read_text()
    finally:
        controller.kill()
        controller.wait()
    last = {"training.max_steps": site.steps(RUN) + 3, "weights.transport": transport}
    site.millrace.run(*campaign(site, **last), "--resume").expect_success()
    status = StatusReader(site.store(RUN)).look()
    assert status["weight_sync"]["transport"] == transport
    assert status["state"] == "finished"
    assert_balanced(status)


def test_a_host_outside_the_trainers_network_is_named(site: HostsSite) -> None:
    site.worker(site.hosts[0], "training")
    site.wait_for_workers("training")
    settings = {"placement.generate.work_pool": None, "placement.score.work_pool": None}
    ended = site.millrace.run(*campaign(site, **settings | {"placement.train.network": "192.168.77.0/24"}))
    last = ended.expect_refusal()
    assert ": placement.train.network is 192.168.77.0/24, and host host-" in last
    assert last.endswith("expected a network that this host is in")
