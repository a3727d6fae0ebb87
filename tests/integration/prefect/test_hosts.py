"""One campaign on three hosts, joined by a network that fails: controller and stores here, a work pool on each other.

here: Prefect server, controller, Ceph ──┬── host-N-2: generator, scorer
                                         └── host-N-3: trainer, sync_weights ══direct═════► host-N-2
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import assert_balanced, stages_of, wait_until
from support.campaigns.site import HostsSite, made_site

from millrace.runs.status import StatusReader

pytestmark = [pytest.mark.campaign, pytest.mark.ceph, pytest.mark.faults, pytest.mark.timeout(1500)]


@pytest.fixture
def site(tmp_path: Path, environment: dict[str, str]) -> Iterator[HostsSite]:
    with made_site(tmp_path, environment, 2) as site:
        yield site


def campaign(site: HostsSite, run_id: str, **settings: object) -> list[str]:
    placed = {
        "placement.generate.work_pool": "generating",
        "placement.score.work_pool": "generating",
        "placement.train.work_pool": "training",
        "weights.transport": "direct",
        "placement.train.network": f"{site.hosts[1].address}/32",
    }
    return site.millrace.campaign(run_id, root=site.root, **placed, **settings)


def seconds_until(condition: Callable[[], bool], what: str) -> float:
    started = time.monotonic()
    wait_until(condition, what, 300)
    return time.monotonic() - started


def row(what: str, noticed: float, overcome: float | None) -> None:
    recovery = "–" if overcome is None else f"{overcome:.0f} s after it is back"
    print(f"| {what} | {noticed:.0f} s | {recovery} | 0 | exact |", flush=True)


def test_a_campaign_survives_hosts_that_are_cut_off_and_switched_off(site: HostsSite) -> None:
    generating, training = site.hosts
    site.worker(generating, "generating")
    site.worker(training, "training")
    site.wait_for_workers("generating")
    site.wait_for_workers("training")
    controller, log = site.start(*campaign(site, "three", **{"training.max_steps": 400}))
    try:
        site.wait_for_steps("three", 3, "three steps on three hosts")
        generating.cut()
        noticed = seconds_until(lambda: "has been silent" in log.read_text(), "the silence to be noticed")
        generating.mend()
        overcome = site.wait_for_steps("three", 5, "steps after the link is mended")
        row("the generator's host is cut off, then back", noticed, overcome)

        lost = log.read_text().count("train-0 of work pool training")
        training.kill_all()
        noticed = seconds_until(
            lambda: log.read_text().count("train-0 of work pool training") > lost, "the loss to be noticed"
        )
        site.worker(training, "training")
        overcome = site.wait_for_steps("three", 3, "steps after the trainer's host is back")
        row("the trainer's host is switched off, then back", noticed, overcome)
        controller.kill()
        killed = time.monotonic()
        wait_until(lambda: stages_of(f"{site.root}/three") == [], "every stage on every host to end", 120)
        row("kill -9 of the controller: its hosts' stages drain", time.monotonic() - killed, None)
    finally:
        controller.kill()
        controller.wait()
    more = {"training.max_steps": site.steps("three") + 3}
    site.millrace.run(*campaign(site, "three", **more), "--resume").expect_success()
    status = StatusReader(site.store("three")).look()
    assert status["state"] == "finished"
    assert_balanced(status)


def test_a_root_that_a_host_cannot_see_is_named_by_the_host(site: HostsSite) -> None:
    hidden = site.millrace.root
    hidden.mkdir(exist_ok=True)
    site.worker(site.hosts[0], "generating", hide=str(hidden))
    site.wait_for_workers("generating")
    ended = site.millrace.run(*site.millrace.campaign("unseen", **{"placement.score.work_pool": "generating"}))
    last = ended.expect_refusal()
    host = site.hosts[0].name
    assert last.startswith(f"millrace: score-0 of work pool generating: host {host} sees no attempt 0 of a run at")
    assert last.endswith("expected a storage.root that the controller and every host of placement share")
