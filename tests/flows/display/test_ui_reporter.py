"""Tables, plots and the report of a campaign in the Prefect UI."""

import base64
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from support.campaigns.status import STATUS, status_with

from configs.operation import BudgetConfig
from configs.schema import RunConfig
from configs.training import TrainingConfig
from flows.campaign.report import Outcome, write_report
from flows.display import ui_reporter
from flows.display.plots import line_chart
from flows.display.tables import Row
from flows.display.ui_reporter import EVERY_SECONDS, Artifacts
from millrace.evaluation.promotion import Decision, write_decision
from millrace.evaluation.results import write_result
from millrace.runs.history import Point
from millrace.runs.record import create_run, end_attempt, resume_run
from storage import layout
from storage.progress import write_progress
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter


def later(seconds: float, tokens: int) -> dict[str, Any]:
    """The status after each stage has worked for `seconds` and processed `tokens`."""
    return status_with(
        tokens={stage: count + tokens for stage, count in STATUS["tokens"].items()},
        seconds={what: spent + seconds for what, spent in STATUS["seconds"].items()},
    )


class Screen:
    """Records tables, and has a clock."""

    def __init__(self) -> None:
        self.tables: list[list[Row]] = []
        self.now = 100.0
        self.away = False

    def write(self, table: list[Row], *, key: str, description: str) -> None:
        if self.away:
            raise ConnectionError("the server is away")
        assert key == "mine-staleness", "nothing was evaluated or decided"
        self.tables.append(table)

    def artifacts(self) -> Artifacts:
        return Artifacts("mine", clock=lambda: self.now)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(ui_reporter, "create_table_artifact", screen.write)
    return screen


def test_the_table_has_speed_and_share_since_the_last_one_and_the_state_of_the_flow(screen: Screen) -> None:
    artifacts = screen.artifacts()
    artifacts.look_at_tables(STATUS, over=False)
    screen.now += EVERY_SECONDS
    artifacts.look_at_tables(later(3.0, 300), over=False)
    [table] = screen.tables
    assert [(row["figure"], row["value"]) for row in table] == [
        *((stage, "10 tokens/s, busy 50%, idle 50%") for stage in ("generate", "score", "train")),
        ("sync_weights", "busy 50%, idle 50%"),
        ("version", "7 of 4000; 8 used by generators"),
        ("staleness", "mean 1.50, max 2 of 4"),
        ("rollouts by staleness", "0: 16 (25%)  2: 48 (75%)"),
        ("queue", "28 rollouts on their way to the trainer"),
    ]


def test_a_table_is_written_every_thirty_seconds_if_anything_moves_and_at_the_end(screen: Screen) -> None:
    artifacts = screen.artifacts()
    for look in range(301):
        screen.now = 100.0 + 2.0 * look
        artifacts.look_at_tables(later(look, look), over=False)
    assert len(screen.tables) == 600 / EVERY_SECONDS == 20
    for look in range(301, 400):
        screen.now = 100.0 + 2.0 * look
        artifacts.look_at_tables(later(look, 300), over=look == 399)
    assert len(screen.tables) == 20, "only idle time has passed"
    artifacts.look_at_tables(later(400, 301), over=True)
    assert len(screen.tables) == 21


def test_a_table_that_failed_is_written_when_the_server_is_back(screen: Screen) -> None:
    artifacts = screen.artifacts()
    artifacts.look_at_tables(STATUS, over=False)
    screen.now += EVERY_SECONDS
    screen.away = True
    with pytest.raises(ConnectionError):
        artifacts.look_at_tables(later(1.0, 1), over=False)
    screen.now += EVERY_SECONDS
    screen.away = False
    artifacts.look_at_tables(later(1.0, 1), over=False)
    assert len(screen.tables) == 1


def drawing(image: str) -> ElementTree.Element:
    """The SVG in a Markdown image."""
    match = re.fullmatch(r"!\[[^]]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", image)
    assert match is not None, image[:200]
    return ElementTree.fromstring(base64.b64decode(match[1]))


def corners(svg: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The corners of each line, in pixels."""
    lines = [line.attrib["points"].split() for line in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    return [[(float(x), float(y)) for x, y in (corner.split(",") for corner in line)] for line in lines]


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 0.0)],
        [(3.0, 0.5), (3.0, 0.5)],
        [(1.0, -4.0), (400.0, 1e-9)],
        [(float(x), 1e12 * x) for x in range(1, 101)],
    ],
)
def test_every_line_is_drawn_within_its_picture(points: list[Point]) -> None:
    svg = drawing(line_chart("any", {"line": points}))
    (line,) = corners(svg)
    assert len(line) == len(points)
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    assert all(0 < x < width and 0 < y < height for x, y in line)


def test_higher_values_are_drawn_higher_and_later_versions_further_right() -> None:
    line_a, line_b = corners(drawing(line_chart("two", {"a": [(1, 1), (2, 3)], "b": [(1, 2), (2, 0)]})))
    assert line_a[0][0] == line_b[0][0] < line_a[1][0] == line_b[1][0]
    assert line_a[1][1] < line_b[0][1] < line_a[0][1] < line_b[1][1]


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


@pytest.mark.parametrize("outcome", ["finished", "window over", "stopped"])
def test_the_report_has_outcome_gate_and_figures_and_is_stored_in_the_run(outcome: Outcome, run: LocalStore) -> None:
    write_report(run, 0, "stopped")
    write_decision(
        run, 0, Decision(promoted=True, policy_version=40, accuracy=0.75, sentence="it is promoted", bar=None)
    )
    markdown = write_report(run, 0, outcome)
    assert bytes(run.get(layout.report(0))).decode() == markdown
    assert markdown.startswith(f"# mine, attempt 0: {outcome}\n")
    assert "this attempt made 40 optimizer steps, to version 40 of 400: " in markdown
    assert "\nGate: it is promoted.\n" in markdown
    assert "| accuracy, version 40 | 0.750 of 512 held-out prompts |" in markdown
    assert "| train busy | 75% of 40 s |" in markdown
    images = re.findall(r"!\[([^:\]]*)", markdown)
    assert images == [
        "Reward",
        "Held-out accuracy",
        "Staleness, policy versions",
        "Throughput of the trainer, response tokens per second",
    ]
    assert len(markdown) < 64 * 1024


def test_an_attempt_without_steps_has_a_report_without_plots(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "young")
    create_run(store, "young", RunConfig(training=TrainingConfig(max_steps=9)).model_dump(mode="json"))
    markdown = write_report(store, 0, "stopped")
    assert "this attempt made 0 optimizer steps, to version 0 of 9" in markdown
    assert "No checkpoint was judged for promotion." in markdown
    assert "![" not in markdown


def test_the_report_of_a_resumed_run_names_changed_settings_and_the_last_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "resumed")
    configs = [RunConfig(training=TrainingConfig(max_steps=steps)).model_dump(mode="json") for steps in (9, 12)]
    create_run(store, "resumed", configs[0])
    assert "Changed since" not in write_report(store, 0, "stopped")
    resume_run(store, configs[1])
    report = write_report(store, 1, "stopped")
    assert "Changed since the attempt before it: training.max_steps was 9 and is 12." in report
    assert "The attempt before it was killed." in report
    end_attempt(store, 1, "failed", "the disk is full")
    resume_run(store, configs[1])
    assert "The attempt before it failed: the disk is full." in write_report(store, 2, "finished")
