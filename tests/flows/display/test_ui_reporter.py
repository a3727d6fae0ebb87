"""Tables and the report of a campaign in the Prefect UI."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from support.campaigns.status import status_with

from configs.operation import BudgetConfig
from configs.schema import RunConfig
from configs.training import TrainingConfig
from flows.campaign.report import write_report
from flows.display.artifacts import PROGRESS_SECONDS, TABLE_SECONDS, Artifacts
from millrace.evaluation.promotion import PromotionDecision, write_decision
from millrace.evaluation.results import write_result
from millrace.runs.record import EndState, create_run, end_attempt, resume_run
from millrace.runs.status import StatusReader
from storage import layout
from storage.progress import write_progress
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter


class FakeServer:
    """Keeps artifacts by their ids, and counts updates."""

    def __init__(self) -> None:
        self.artifacts: dict[UUID, Artifact] = {}
        self.updates = 0
        self.away = False

    def read_artifacts(self, *, artifact_filter: ArtifactFilter) -> list[Artifact]:
        wanted = (artifact_filter.key, artifact_filter.flow_run_id)
        return [
            artifact
            for artifact in self.artifacts.values()
            if (ArtifactFilterKey(any_=[str(artifact.key)]), of_flow_run(artifact.flow_run_id)) == wanted
        ]

    def create_artifact(self, artifact: ArtifactCreate) -> Artifact:
        if self.away:
            raise ConnectionError("the server is away")
        created = Artifact.model_validate(artifact.model_dump())
        self.artifacts[created.id] = created
        return created

    def update_artifact(self, artifact_id: UUID, artifact: ArtifactUpdate) -> None:
        self.artifacts[artifact_id].data = artifact.data
        self.updates += 1

    def data(self, key: str) -> Any:
        """The data of the only artifact with this key."""
        (data,) = [artifact.data for artifact in self.artifacts.values() if artifact.key == key]
        return data


def of_flow_run(flow_run_id: UUID | None) -> ArtifactFilterFlowRunId:
    assert flow_run_id is not None
    return ArtifactFilterFlowRunId(any_=[flow_run_id])


class Screen:
    """The artifacts of a run on a server, at a clock."""

    def __init__(self, server: FakeServer, flow_run_id: UUID) -> None:
        self.server = server
        self.now = 100.0
        self._artifacts = Artifacts(server, "mine", flow_run_id, clock=lambda: self.now)

    def update(self, step: int, *, after: float = 0.0, over: bool = False) -> None:
        self.now += after
        self._artifacts.update(status_with(steps=step), over=over)


FLOW_RUNS = UUID(int=1), UUID(int=2)


@pytest.fixture
def screen() -> Screen:
    return Screen(FakeServer(), FLOW_RUNS[0])


def test_the_table_has_the_key_figures(screen: Screen) -> None:
    screen.update(7)
    values = {row["figure"]: row["value"] for row in json.loads(screen.server.data("mine-figures"))}
    assert values["version"] == "7 of 4000; generators used 8, from 0 on"
    assert values["staleness"] == "mean 1.50, max 2 of 4"
    assert values["tokens per second"].startswith("generate 19 (busy 50%)")
    assert screen.server.data("mine-progress") == 0.175


def test_a_kind_has_one_artifact_whose_updates_are_limited(screen: Screen) -> None:
    for step in range(300):
        screen.update(step, after=2.0)
    assert len(screen.server.artifacts) == 2, "nothing was evaluated or decided"
    updates = 600 / TABLE_SECONDS + 600 / PROGRESS_SECONDS - 2
    assert screen.server.updates == updates
    for _ in range(100):
        screen.update(295, after=2.0)
    assert screen.server.updates == updates + 1, "only the table of version 285 was behind"
    screen.update(296, over=True)
    assert screen.server.updates == updates + 3


def test_a_resumed_flow_run_goes_on_with_its_artifacts_and_another_has_its_own(screen: Screen) -> None:
    screen.update(1)
    Screen(screen.server, FLOW_RUNS[0]).update(2)
    assert json.loads(screen.server.data("mine-figures"))[0]["value"].startswith("2 of")
    Screen(screen.server, FLOW_RUNS[1]).update(3)
    assert len(screen.server.artifacts) == 4


def test_a_table_that_failed_is_written_when_the_server_is_back(screen: Screen) -> None:
    screen.server.away = True
    with pytest.raises(ConnectionError):
        screen.update(1)
    screen.server.away = False
    screen.update(1, after=2.0)
    assert len(screen.server.artifacts) == 2


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    """A run whose trainer has made 40 of 400 versions."""
    store = LocalStore(tmp_path / "mine")
    config = RunConfig(training=TrainingConfig(max_steps=400), budget=BudgetConfig(max_steps=40))
    create_run(store, "mine", config.model_dump(mode="json"))
    stream = StreamWriter(store, layout.metrics("train", 0), METRIC, "train-0")
    names = ("reward_mean", "staleness_mean", "staleness_max", "tokens")
    for version in range(1, 41):
        measured = {"t": 2.0 * version, "incarnation": 0, "policy_version": version, "value": version / 40}
        stream.write(pa.Table.from_pylist([{**measured, "name": name} for name in names], schema=METRIC), tokens=0)
    for version, accuracy in ((0, 0.25), (40, 0.75)):
        write_result(store, {"policy_version": version, "accuracy": accuracy, "prompts": 512, "t": 50.0})
    life = {"pid": 1, "t": 3000.0, "doing": "stopped", "seconds": {"train": 30.0, "idle": 10.0}, "policy_version": 40}
    write_progress(store, "train", 0, life)
    return store


def report_of(store: LocalStore) -> str:
    return write_report(store, StatusReader(store).look())


@pytest.mark.parametrize(("state", "outcome"), [("finished", "finished"), ("stopped", "window over")])
def test_the_report_has_outcome_gate_and_figures_and_is_stored_in_the_run(
    state: EndState, outcome: str, run: LocalStore
) -> None:
    report_of(run)
    write_decision(
        run, 0, PromotionDecision(promoted=True, policy_version=40, accuracy=0.75, sentence="it is promoted", bar=None)
    )
    end_attempt(run, 0, state)
    markdown = report_of(run)
    assert bytes(run.get(layout.report(0))).decode() == markdown
    assert markdown.startswith(f"# mine, attempt 0: {outcome}\n")
    assert "this attempt made 40 optimizer steps, to version 40 of 400: " in markdown
    assert "\nGate: it is promoted.\n" in markdown
    assert f"`millrace export {run.url} --to FOLDER --promoted`" in markdown
    assert "| accuracy, version 40 | 0.750 of 512 held-out prompts |" in markdown
    assert "train 0 (busy 75%)" in markdown


def test_an_attempt_without_steps_has_a_report(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "young")
    create_run(store, "young", RunConfig(training=TrainingConfig(max_steps=9)).model_dump(mode="json"))
    markdown = report_of(store)
    assert "this attempt made 0 optimizer steps, to version 0 of 9" in markdown
    assert "No checkpoint was judged for promotion." in markdown


def test_the_report_names_the_data_and_the_teachers_that_the_model_was_trained_on(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "taught")
    inputs = {"prompts.source sums.jsonl": "8 prompts 1a2b", "teachers.expert.path models/expert": "files 3c4d"}
    config = RunConfig(training=TrainingConfig(max_steps=9)).model_dump(mode="json")
    create_run(store, "taught", config, inputs=inputs)
    markdown = report_of(store)
    assert "| prompts.source sums.jsonl | 8 prompts 1a2b |" in markdown
    assert "| teachers.expert.path models/expert | files 3c4d |" in markdown


def test_the_report_has_a_table_of_several_sources(run: LocalStore) -> None:
    status = StatusReader(run).look()
    assert "| source |" not in write_report(run, status)
    sums = {"weight": 2.0, "trained_share": 1.0, "groups_trained": 3, "groups_dropped": 1, "reward_mean": 0.5}
    markdown = write_report(run, {**status, "sources": {"sums": {**sums, "accuracy": None}}})
    assert "\n| sums | 2 (100.0%) | 3 (100.0%) | 1 | 0.50 | – |\n" in markdown


def test_the_report_of_a_resumed_run_names_changed_settings_and_the_last_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "resumed")
    configs = [RunConfig(training=TrainingConfig(max_steps=steps)).model_dump(mode="json") for steps in (9, 12)]
    create_run(store, "resumed", configs[0])
    assert "Changed since" not in report_of(store)
    resume_run(store, configs[1])
    report = report_of(store)
    assert "Changed since the attempt before it: training.max_steps was 9 and is 12." in report
    assert "The attempt before it was killed." in report
    end_attempt(store, 1, "failed", "the disk is full")
    resume_run(store, configs[1])
    assert "The attempt before it failed: the disk is full." in report_of(store)
