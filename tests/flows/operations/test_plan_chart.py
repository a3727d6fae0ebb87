"""The chart of a plan, and the plan as Markdown."""

import pytest
from support.planning.small_machine import SmallMachine

from configs.schema import RunConfig
from flows.operations.plan import as_markdown, splits, table_rows
from millrace.planning.plan import Plan, what_if
from millrace.planning.search import make_plan, simulator

CONFIG = RunConfig.model_validate(
    {
        "training": {"max_steps": 3, "groups_per_step": 16, "max_tokens_per_microbatch": 4096},
        "generation": {"engine": "vllm", "group_size": 4, "max_new_tokens": 128},
    }
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CONFIG, SmallMachine(), simulator(10), gpus=8, goal="fastest")


def test_the_chart_has_a_line_per_size_of_a_generator_and_the_winner(plan: Plan) -> None:
    lines = splits(plan)
    winner = plan.chosen
    assert winner.outcome is not None
    gpus, tensor = winner.split
    assert dict(lines[f"TP {tensor}"])[gpus] <= winner.outcome.step_seconds * 1.001
    assert lines["winner"] == [(gpus, winner.outcome.step_seconds)]
    assert all([x for x, _ in points] == sorted(x for x, _ in points) for points in lines.values())


def test_a_comparison_of_two_configs_has_no_chart() -> None:
    made = what_if(CONFIG, CONFIG, {}, SmallMachine(), simulator(10))
    assert splits(made) == {}
    assert "as it is" in as_markdown(made)


def test_the_markdown_has_figures_chart_runners_up_and_assumptions(plan: Plan) -> None:
    text = as_markdown(plan)
    for part in (
        "| trainer GPUs |",
        "## settings",
        "## runners-up",
        "\n- 1: ",
        "## assumptions",
        "![Seconds per step",
        "data:image/svg+xml;base64,",
    ):
        assert part in text
    # Every row of a table has as many cells as its header.
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1


def test_the_table_lists_every_simulated_config_with_its_bottleneck(plan: Plan) -> None:
    rows = table_rows(plan)
    assert len(rows) == len(plan.simulated)
    assert all(row["bottleneck"] for row in rows)
