"""An error from its origin to the terminal: its kind, key and expected value arrive, on this host and on another."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from prefect.states import Failed
from support.stages.fake_stage import ERRORS

from flows.campaign import remote_stages
from flows.campaign.remote_stages import _RemoteStage
from flows.cli.main import main
from millrace.errors import (
    USER_ERROR,
    InputError,
    ModelFolderError,
    PromptsError,
    StageDied,
    TrainingDiverged,
    exit_code,
    from_json,
    to_json,
)
from millrace.runtime.heartbeat import HeartbeatPublisher
from millrace.runtime.messages import encode_line, read_line
from storage.errors import StoreFull, StreamCorrupt
from storage.stores.base import Store
from storage.stores.local import LocalStore
from tasks.events import FlowRunStates
from tasks.jobs import Job, StageProcess

MISTAKE = ERRORS[USER_ERROR]
LINE = "a.yaml: training.max_steps is 0; expected at least 1"
JOB = Job(processes=(StageProcess(stage="generate", replica=0, threads=1),), work_pool="hosts", job_variables={})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "run", fsync=False)


def from_host(store: Store, values: dict[str, Any], *states: Any) -> None:
    """What the controller raises once the host of JOB has published these values."""
    flow_run_id = uuid4()
    if values:
        with HeartbeatPublisher(
            store, JOB.status_record, 0, owner_id=str(flow_run_id), draining=lambda: False, host="b", doing="on b"
        ) as publisher:
            publisher.publish(**values)
    _RemoteStage(store, JOB, flow_run_id, 1.0).monitor(cast(FlowRunStates, SimpleNamespace(states=list(states))))


@pytest.mark.parametrize("error", ERRORS.values(), ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_kind_and_fields_in_each_form(error: Exception) -> None:
    """The line of a stage, the JSON of a child's reply and of a host's status record, and Prefect's task."""
    for copy in (read_line(encode_line(error)), from_json(to_json(error)), pickle.loads(pickle.dumps(error))):
        assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PromptsError("none", key="prompts.source"), PromptsError, USER_ERROR),
        (ModelFolderError("empty", file="m"), ModelFolderError, USER_ERROR),
        (TrainingDiverged("not finite", expected="a smaller rate"), InputError, USER_ERROR),
        (StoreFull("no space", file="runs"), InputError, USER_ERROR),
        (StreamCorrupt("log/3.json", "a wrong checksum", 3), InputError, USER_ERROR),
        (KeyError("loss"), StageDied, None),
        (StageDied("train-0 was killed"), StageDied, None),
    ],
)
def test_other_errors_become_one_of_few_kinds_with_the_same_line(
    error: Exception, kind: type[Exception], code: int | None
) -> None:
    copy = from_json(to_json(error))
    assert (type(copy), str(copy), exit_code(error)) == (kind, str(error), code)


def test_an_unknown_kind_is_not_an_error_of_ours() -> None:
    """A supervisor skips such a line."""
    with pytest.raises(KeyError):
        from_json({"kind": "SystemExit", "read": "0"})


@pytest.mark.parametrize("error", ERRORS.values(), ids=lambda error: type(error).__name__)
def test_an_error_on_another_host_arrives_with_the_host(store: Store, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        from_host(store, {"ended": True, "error": to_json(error)})
    assert str(raised.value) == f"generate-0 of work pool hosts on b: {error}"


def test_a_mistake_on_another_host_is_one_line_with_key_and_expected_value_at_the_terminal(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as raised:
        from_host(store, {"ended": True, "error": to_json(MISTAKE)})
    assert (raised.value.key, raised.value.expected) == ("training.max_steps", "at least 1")

    def fail(*_: object) -> int:
        raise raised.value

    monkeypatch.setattr("flows.cli.run.run_campaign", fail)
    assert main(["run", "configs/presets/tiny-cpu.yaml"]) == USER_ERROR
    assert capsys.readouterr().err == f"millrace: generate-0 of work pool hosts on b: {LINE}\n"


def test_a_host_that_does_not_see_the_run_says_so_by_its_flow_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_stages, "_LATE_SECONDS", 0.0)
    with pytest.raises(InputError) as raised:
        from_host(store, {}, Failed(message=LINE))
    assert str(raised.value) == f"generate-0 of work pool hosts: {LINE}"
