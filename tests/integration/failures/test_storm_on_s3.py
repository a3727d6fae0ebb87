"""Campaigns on S3 whose stages are killed, over a link that loses and damages data: the ledger is exact."""

import itertools
import json
from pathlib import Path

import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced
from support.campaigns.kill_matrix import campaigns
from support.damage.recount import check_recount, copied_from_s3
from support.stores.ceph import CephServer
from support.stores.flaky_link import STORM, flaky_link

pytestmark = [pytest.mark.campaign, pytest.mark.ceph, pytest.mark.faults, pytest.mark.timeout(1500)]

STEPS, GROUPS, GROUP_SIZE = 12, 16, 8
SETTINGS: dict[str, object] = {**FROM_SCRATCH, "training.max_steps": STEPS, "storage.commit_unfinished_seconds": 0.2}
SIGKILLED = -9


def kills(seed: int) -> list[str]:
    """The kills of an asynchronous campaign of the matrix; on S3 nothing can be killed in the middle of a write."""
    specs = next(itertools.islice(campaigns(seed), 2, None))
    return [spec for spec in specs if "put.mid" not in spec]


@pytest.mark.parametrize("seed", range(6))
def test_kills_and_a_flaky_link_to_s3_lose_and_repeat_nothing(
    seed: int, millrace: Millrace, ceph: CephServer, tmp_path: Path
) -> None:
    armed = millrace.arm(tmp_path / "fired", *kills(seed))
    root = f"s3://{ceph.make_bucket()}/runs"
    with flaky_link(ceph.endpoint, seed, STORM) as link:
        millrace.environment |= ceph.environment | {"AWS_ENDPOINT_URL": link.endpoint}
        arguments = millrace.campaign("stormy", "--resume", "latest", root=root, **SETTINGS)
        while (ended := millrace.run(*arguments)).code == SIGKILLED:
            pass
        assert ended.code == 0, f"{armed.armed}\n{ended.output}"
        millrace.run("fsck", f"{root}/stormy").expect_success()
    assert armed.missed() == []
    assert set(link.fired) == set(STORM), link.fired
    run = copied_from_s3(f"{root}/stormy", ceph.endpoint, ceph.key, ceph.secret, tmp_path / "copy")
    summary = json.loads((run / "summary.json").read_text())
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * GROUPS * GROUP_SIZE
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}, "no bit that flipped on its way costs a group"
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(link.fired.items()))
    print(f"seed {seed}: {len(armed.armed)} kills; of {link.requests:,} requests {faults}")
    print(f"recount: {check_recount(run, summary)}")
