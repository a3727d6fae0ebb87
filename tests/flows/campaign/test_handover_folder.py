"""The folder in shared memory belongs to one attempt."""

import shutil
import uuid
from collections.abc import Iterator

import pytest

from flows.campaign.handover import handover_folder


@pytest.fixture
def owner() -> Iterator[str]:
    name = f"memory://test-{uuid.uuid4().hex}"
    yield name
    shutil.rmtree(handover_folder(name, 1000))


def test_an_old_controller_that_cleans_up_leaves_the_new_ones_folder(owner: str) -> None:
    old, new = handover_folder(owner, 1), handover_folder(owner, 2)
    (new / "handover").write_bytes(b"weights")
    shutil.rmtree(old, ignore_errors=True)
    assert (new / "handover").read_bytes() == b"weights"
    # It slept before it made its folder.
    shutil.rmtree(handover_folder(owner, 1))
    assert (new / "handover").read_bytes() == b"weights"


def test_what_a_killed_controller_left_is_removed_by_the_next_attempt(owner: str) -> None:
    killed = handover_folder(owner, 9)
    (killed / "handover").write_bytes(b"weights")
    new = handover_folder(owner, 10)
    assert (killed.exists(), list(new.iterdir())) == (False, [])


def test_an_attempt_that_starts_again_finds_its_folder_empty(owner: str) -> None:
    first = handover_folder(owner, 3)
    (first / "handover").write_bytes(b"weights")
    assert (handover_folder(owner, 3), list(first.iterdir())) == (first, [])


def test_runs_do_not_share_a_folder(owner: str) -> None:
    other = f"{owner}-other"
    ours, theirs = handover_folder(owner, 0), handover_folder(other, 1)
    assert ours.exists()
    shutil.rmtree(theirs)
