"""What an attempt leaves behind: a sign of life while it lasts, how it ended, and no folder in shared memory."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.campaign.attempt import attempt_under_way, handover_folder
from millrace.errors import StageDied
from millrace.runs.record import CONTROLLER, AttemptEnd, end_attempt, read_end
from storage.progress import read_status
from storage.stores.base import Store
from storage.stores.local import LocalStore
from tasks.stop import STOP


@pytest.fixture(autouse=True)
def nothing_stops() -> Iterator[None]:
    yield
    STOP.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run")


def end_after(store: Store, error: BaseException) -> AttemptEnd | None:
    with pytest.raises(type(error)), attempt_under_way(store, 0, Path("nowhere"), "campaign"):
        raise error
    return read_end(store, 0)


def test_the_controller_of_any_campaign_shows_that_it_is_alive(store: Store, tmp_path: Path) -> None:
    handover = tmp_path / "handover"
    handover.mkdir()
    with attempt_under_way(store, 3, handover, "campaign"):
        assert read_status(store, CONTROLLER, 0)["of"] == "3"
        assert read_end(store, 3) is None
    assert not handover.exists()


def test_an_error_fails_the_attempt_with_its_first_line(store: Store) -> None:
    error = StageDied("train-0 was killed by SIGKILL; its log ends:\nstep 3")
    cause = "train-0 was killed by SIGKILL; its log ends:"
    assert end_after(store, error) == AttemptEnd(state="failed", cause=cause)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (KeyError("loss"), AttemptEnd(state="failed", cause="KeyError: 'loss'")),
        (KeyboardInterrupt(), AttemptEnd(state="stopped")),
    ],
)
def test_an_internal_error_fails_the_attempt_and_ctrl_c_stops_it(
    store: Store, error: BaseException, end: AttemptEnd
) -> None:
    assert end_after(store, error) == end


def test_a_finished_attempt_stays_finished(store: Store) -> None:
    with attempt_under_way(store, 0, Path("nowhere"), "campaign"):
        end_attempt(store, 0, "finished")
    assert read_end(store, 0) == AttemptEnd(state="finished")


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
