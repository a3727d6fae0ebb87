"""Every stage meets a full disk: one sentence, nothing half-made, and the run goes on once there is room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced

from storage.stores.base import TEMPORARY_PREFIX

pytestmark = pytest.mark.campaign

STAGE_OF = {
    "streams/trajectories": "generate",
    "streams/scores": "score",
    "checkpoints": "train",
    "weights": "sync_weights",
}
"""Which stage writes where."""


class SmallDisks:
    """A disk of 64 KiB, a tmpfs, under each stage's own folder of a run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.full: list[str] = []

    def mount(self, folder: str) -> None:
        (self._run / folder).mkdir(parents=True)
        mounted = self._mount(folder, "size=64k")
        if mounted.returncode:
            pytest.skip(f"no small disk: {mounted.stderr.strip()}")
        self.full.append(folder)

    def make_room(self, folder: str) -> None:
        assert self._mount(folder, "remount,size=64m").returncode == 0
        self.full.remove(folder)

    def unmount(self) -> None:
        for folder in STAGE_OF:
            subprocess.run(["umount", str(self._run / folder)], capture_output=True)

    def _mount(self, folder: str, options: str) -> subprocess.CompletedProcess[str]:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._run / folder)]
        return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def disks(millrace: Millrace) -> Iterator[SmallDisks]:
    disks = SmallDisks(millrace.root / "cramped")
    try:
        for folder in STAGE_OF:
            disks.mount(folder)
        yield disks
    finally:
        disks.unmount()


@pytest.mark.extended
def test_a_full_disk_ends_the_campaign_with_one_sentence_and_it_goes_on_once_there_is_room(
    millrace: Millrace, disks: SmallDisks
) -> None:
    settings = {"weights.transport": "store", "training.max_steps": 12}
    run = millrace.root / "cramped"
    ended = millrace.run(*millrace.campaign("cramped", **settings))
    while disks.full:
        assert ended.code == 2, ended.output
        assert "Traceback" not in ended.output
        (line,) = [line for line in ended.output.splitlines() if "no room left to write" in line]
        (folder,) = [folder for folder in disks.full if f"no room left to write {folder}/" in line]
        assert not list(run.rglob(f"{TEMPORARY_PREFIX}*"))
        checked = millrace.run("fsck", str(run))
        assert checked.code == 0, checked.output
        disks.make_room(folder)
        ended = millrace.run(*millrace.campaign("cramped", "--resume", **settings))
    assert ended.code == 0, ended.output
    summary = millrace.summary("cramped")
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 12 * 16 * 8
