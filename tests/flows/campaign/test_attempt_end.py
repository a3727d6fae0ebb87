"""What an attempt leaves behind: a sign of life while it lasts, and how it ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.campaign.attempt_end import attempt_under_way
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


def test_an_internal_error_is_named_by_its_type(store: Store) -> None:
    assert end_after(store, KeyError("loss")) == AttemptEnd(state="failed", cause="KeyError: 'loss'")


def test_ctrl_c_stops_the_attempt(store: Store) -> None:
    assert end_after(store, KeyboardInterrupt()) == AttemptEnd(state="stopped")


def test_a_finished_attempt_stays_finished(store: Store) -> None:
    with attempt_under_way(store, 0, Path("nowhere"), "campaign"):
        end_attempt(store, 0, "finished")
    assert read_end(store, 0) == AttemptEnd(state="finished")
