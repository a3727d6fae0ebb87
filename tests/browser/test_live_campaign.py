"""The dashboard beside a real campaign: it follows while stages write, and tells the end as the store does."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.campaigns.campaigns import Millrace, await_end, wait_until
from support.pages.dashboard_page import Watched

from dashboard.views.registry import VIEWS
from storage import layout
from storage.schema import CONSUMED
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = [pytest.mark.browser, pytest.mark.campaign, pytest.mark.extended]

SECONDS = 3.0
"""From a commit until the page shows it, at most."""
ENOUGH = 5
"""Commits that are watched."""


@pytest.fixture
def millrace(root: Path, tmp_path: Path) -> Iterator[Millrace]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = Millrace(root, {**mine, "PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"})
    yield command
    command.close()


class Committed:
    """The newest policy version that a run's trainer has committed the rows of, read by nothing of the dashboard."""

    def __init__(self, run: Path) -> None:
        self._reader = StreamReader(open_store(str(run)), layout.CONSUMED, CONSUMED)
        self.tables: list[pa.Table] = []

    def newest(self) -> int:
        self.tables += [part.table for part in iter(self._reader.next, None)]
        return pc.max(self.tables[-1]["policy_version"]).as_py() if self.tables else 0


def test_each_commit_of_a_running_campaign_is_on_the_page_within_three_seconds(
    millrace: Millrace, watched: Watched
) -> None:
    process = millrace.start(*millrace.campaign("real", **{"training.max_steps": 60}))
    wait_until(lambda: bool(millrace.status_record("real", "train-0")), "the trainer's first status record")
    committed = Committed(millrace.root / "real")
    wait_until(lambda: committed.newest() > 0, "the first step")
    watched.open("/run/real/staleness")
    waits = []
    while len(waits) < ENOUGH and process.poll() is None:
        before = committed.newest()
        wait_until(lambda known=before: committed.newest() > known or process.poll() is not None, "a step")
        expected, began = committed.newest(), time.monotonic()
        wait_until(lambda version=expected: watched.newest_version() >= version, "the page", SECONDS)
        waits.append(time.monotonic() - began)
    print(f"seconds from commit to page: {[round(wait, 2) for wait in waits]}")
    assert waits, "the campaign was over before a commit could be watched"
    assert max(waits) <= SECONDS
    ended = await_end(process, 300)
    assert ended.code == 0, ended.output
    summary = millrace.summary("real")
    assert committed.newest() == 60
    wait_until(lambda: watched.newest_version() == 60, "the page", SECONDS)
    rows = pa.concat_tables(committed.tables)
    trained = rows.filter(pc.equal(rows["outcome"], "trained")).group_by("policy_version")
    means = trained.aggregate([("staleness", "mean")]).sort_by("policy_version")["staleness_mean"].to_pylist()
    assert watched.figure("staleness-over-time")[0]["y"] == pytest.approx(means)
    watched.open("/run/real/ledger")
    balance = {line[0].split(":")[0]: line[1:] for line in watched.rows("ledger-balance")}
    for name in ("generated", "trained"):
        amount = summary["ledger"][name]
        assert balance[name] == [f"{amount['rollouts']:,}", f"{amount['tokens']:,}"]
    for view in VIEWS:
        watched.open(f"/run/real/{view.name}")
        assert watched.page.locator(".problems").count() == 0
    watched.assert_quiet()
