"""Every stage meets a full disk: one line, nothing half-made, and the run continues once the disk has room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.stores.small_disk import NotMounted, mount_tmpfs

from storage.stores.base import TEMPORARY_PREFIX

pytestmark = pytest.mark.campaign

FOLDERS = ("streams/trajectories", "streams/scores", "checkpoints", "weights")
"""Written by generate, score, train and sync_weights."""


class SmallDisks:
    """A disk of 64 KiB, a tmpfs, under each stage's own folder of a run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.full: list[str] = []

    def mount(self, folder: str) -> None:
        (self._run / folder).mkdir(parents=True)
        try:
            mount_tmpfs(self._run / folder, "size=64k")
        except NotMounted as error:
            pytest.skip(f"no small disk: {error}")
        self.full.append(folder)

    def make_room(self, folder: str) -> None:
        mount_tmpfs(self._run / folder, "remount,size=64m")
        self.full.remove(folder)

    def unmount(self) -> None:
        for folder in FOLDERS:
            subprocess.run(["umount", str(self._run / folder)], capture_output=True)


@pytest.fixture
def disks(millrace: Millrace) -> Iterator[SmallDisks]:
    disks = SmallDisks(millrace.root / "cramped")
    try:
        for folder in FOLDERS:
            disks.mount(folder)
        yield disks
    finally:
        disks.unmount()


@pytest.mark.extended
def test_a_full_disk_ends_the_campaign_with_one_line_until_there_is_room(millrace: Millrace, disks: SmallDisks) -> None:
    settings = {"weights.transport": "store", "training.max_steps": 12}
    run = millrace.root / "cramped"
    ended = millrace.run(*millrace.campaign("cramped", **settings))
    while disks.full:
        ended.expect_refusal()
        (line,) = [line for line in ended.output.splitlines() if "no room left to write" in line]
        (folder,) = [folder for folder in disks.full if f"no room left to write {folder}/" in line]
        assert not list(run.rglob(f"{TEMPORARY_PREFIX}*"))
        millrace.run("fsck", str(run)).expect_success()
        disks.make_room(folder)
        ended = millrace.run(*millrace.campaign("cramped", "--resume", **settings))
    ended.expect_success()
    summary = millrace.summary("cramped")
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 12 * 16 * 8
