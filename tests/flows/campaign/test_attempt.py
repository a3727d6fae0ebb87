"""The frame around an attempt: a heartbeat while it lasts, the record of its end, and its folder in shared memory."""

import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.exceptions import Pause
from prefect.states import Cancelling, Completed, Failed, Paused, Pending, Running, Scheduled, Suspended

from configs.schema import RunConfig
from flows.campaign.attempt import attempt_under_way, handover_folder, run_together
from flows.campaign.flow import stop_request
from flows.campaign.remote_stages import request_place_again, run_remotely
from millrace.errors import InputError, PlaceYielded, StageDied
from millrace.runs.record import CONTROLLER, AttemptEnd, end_attempt, read_end
from storage.progress import read_status
from storage.stores.base import Store
from storage.stores.local import LocalStore
from tasks import device_leases
from tasks.device_leases import devices_when_free, leased_devices
from tasks.jobs import Job, jobs
from tasks.stop import STOP, STOP_NOW


@pytest.fixture(autouse=True)
def clear_stop() -> Iterator[None]:
    yield
    STOP.clear()
    STOP_NOW.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run")


def test_a_running_attempt_has_a_heartbeat_and_a_folder(store: Store) -> None:
    with attempt_under_way(store, 3, "campaign") as (arguments, _):
        assert read_status(store, CONTROLLER, 0)["of"] == "3"
        assert read_end(store, 3) is None
        assert arguments.handover.exists()
    assert not arguments.handover.exists()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (StageDied("train-0 was killed:\nstep 3"), AttemptEnd(state="failed", cause="train-0 was killed:")),
        (KeyError("loss"), AttemptEnd(state="failed", cause="KeyError: 'loss'")),
        (KeyboardInterrupt(), AttemptEnd(state="stopped")),
    ],
)
def test_an_error_fails_the_attempt_and_ctrl_c_stops_it(store: Store, error: BaseException, end: AttemptEnd) -> None:
    with pytest.raises(type(error)), attempt_under_way(store, 0, "campaign"):
        raise error
    assert read_end(store, 0) == end


def test_a_finished_attempt_stays_finished(store: Store) -> None:
    with attempt_under_way(store, 0, "campaign"):
        end_attempt(store, 0, "finished")
    assert read_end(store, 0) == AttemptEnd(state="finished")


@pytest.fixture
def owner() -> Iterator[str]:
    name = f"memory://test-{uuid.uuid4().hex}"
    yield name
    with handover_folder(name, 1000):
        pass


def test_an_old_controller_keeps_the_folder_of_a_later_attempt(owner: str) -> None:
    with handover_folder(owner, 1) as old, handover_folder(owner, 2) as new:
        (new / "handover").write_bytes(b"weights")
        shutil.rmtree(old, ignore_errors=True)
        # It slept before it made its folder.
        with handover_folder(owner, 1):
            assert (new / "handover").read_bytes() == b"weights"


def test_the_next_attempt_removes_the_folder_of_a_killed_controller(owner: str) -> None:
    with handover_folder(owner, 9) as killed:
        (killed / "handover").write_bytes(b"weights")
        with handover_folder(owner, 10) as new:
            assert (killed.exists(), list(new.iterdir())) == (False, [])


def test_a_suspension_stops_the_campaign_even_if_it_was_resumed_meanwhile() -> None:
    first, second = Suspended(), Suspended()
    resumed = [Scheduled(name="Resuming"), Pending(), Running()]
    assert stop_request([Running(), first, *resumed], 0) == first
    assert stop_request([Running(), first, *resumed], 1) is None
    assert stop_request([Running(), first, *resumed, second], 1) == second


def test_cancelling_stops_the_campaign_and_a_pause_in_the_process_does_not() -> None:
    cancelling = Cancelling()
    assert stop_request([Running(), cancelling], 0) == cancelling
    assert stop_request([Scheduled(), Paused(reschedule=False), Running()], 0) is None


def test_a_yielded_place_is_requested_again_and_other_ends_are_as_usual() -> None:
    run = TaskRun(id=uuid.uuid4(), task_key="place", dynamic_key="0")

    def again(error: Exception) -> bool:
        return request_place_again(run_remotely, run, Failed(data=error))

    assert all(again(PlaceYielded("host 0 is away")) for _ in range(10))
    assert not again(InputError("no"))
    assert [again(StageDied("lost")) for _ in range(3)] == [True, True, False]


class FakeTask:
    """The future of a stage task, which ends when it is submitted, or else only when STOP is set.

    `wait_error`: what Prefect raises after a wait.
    """

    def __init__(
        self, *, ends: bool = True, error: Exception | None = None, wait_error: BaseException | None = None
    ) -> None:
        self._ends = ends
        self._error = error
        self._wait_error = wait_error
        self.state = Completed() if error is None else Failed(data=error)

    def add_done_callback(self, callback: Callable[["FakeTask"], None]) -> None:
        if self._ends:
            callback(self)

    def wait(self) -> None:
        assert STOP.is_set()
        if self._wait_error is not None and not STOP_NOW.is_set():
            raise self._wait_error

    def result(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("flows.campaign.attempt.get_run_logger", lambda: logging.getLogger("campaign"))
    return caplog


def test_stages_run_until_one_ends_that_may_not_end_first(log: pytest.LogCaptureFixture) -> None:
    tasks = {"generate-0": FakeTask(ends=False), "evaluate-0": FakeTask(), "train-0": FakeTask()}
    assert run_together(tasks.items(), may_end_first={"evaluate-0"}) == "train-0"
    assert STOP.is_set()


def test_stages_run_until_all_have_ended_or_a_stop_is_requested(log: pytest.LogCaptureFixture) -> None:
    assert (
        run_together([("score-0", FakeTask()), ("score-1", FakeTask())], may_end_first={"score-0", "score-1"}) is None
    )
    assert run_together([("train-0", FakeTask(ends=False))], stop_requested=lambda: True) is None
    assert run_together([("train-0", FakeTask(ends=False))], ends_at=0.0) is None
    reasons = [message for message in log.messages if message.endswith("the stages drain")]
    assert [reason.partition(":")[0] for reason in reasons] == [
        "a stop was requested",
        "budget.duration_minutes is spent",
    ]


@pytest.mark.parametrize(("wait_error", "kills"), [(Pause(), False), (KeyboardInterrupt(), True)])
def test_a_suspension_lets_the_stages_drain_and_ctrl_c_once_more_kills_them(
    wait_error: BaseException, kills: bool, log: pytest.LogCaptureFixture
) -> None:
    tasks = [("train-0", FakeTask(ends=False)), ("evaluate-0", FakeTask(ends=False, wait_error=wait_error))]
    with contextlib.suppress(KeyboardInterrupt):
        run_together(tasks, stop_requested=lambda: True)
    assert STOP_NOW.is_set() == kills


def test_a_failed_stage_ends_the_others_and_raises(log: pytest.LogCaptureFixture) -> None:
    tasks = {"train-0": FakeTask(ends=False), "generate-0": FakeTask(error=StageDied("killed"))}
    with pytest.raises(StageDied):
        run_together(tasks.items())


def test_a_trainer_that_fails_to_drain_raises_and_another_stage_warns(log: pytest.LogCaptureFixture) -> None:
    failed = FakeTask(ends=False, error=StageDied("killed"))
    assert run_together([("generate-0", failed)], stop_requested=lambda: True) is None
    assert "a stage failed to drain" in log.text
    with pytest.raises(StageDied):
        run_together([("train-0", failed)], stop_requested=lambda: True)


def generator_job() -> tuple[RunConfig, Job]:
    config = RunConfig.model_validate({"generation": {"engine": "vllm"}, "training": {"max_steps": 1}})
    return config, next(job for job in jobs(config) if job.name == "generate-0")


def test_a_job_waits_for_gpus_that_another_one_releases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_leases, "host_devices", lambda: ("GPU-a",))
    monkeypatch.setattr(device_leases, "memory_folder", lambda: tmp_path)
    config, job = generator_job()
    with ExitStack() as draining:
        draining.enter_context(leased_devices(config, job.members, "runs/a"))
        Timer(0.5, draining.pop_all().close).start()
        with devices_when_free(config, job.members, "runs/a") as assignment:
            assert assignment == {("generate", 0): ("GPU-a",)}


def test_a_job_whose_gpus_stay_in_use_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_leases, "host_devices", lambda: ("GPU-a",))
    monkeypatch.setattr(device_leases, "memory_folder", lambda: tmp_path)
    monkeypatch.setattr(device_leases, "_RELEASE_SECONDS", 0.0)
    config, job = generator_job()
    with (
        leased_devices(config, job.members, "runs/a"),
        pytest.raises(PlaceYielded),
        devices_when_free(config, job.members, "runs/b"),
    ):
        pass
