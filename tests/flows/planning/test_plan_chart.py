"""The chart of a plan, and the plan as Markdown."""

import pytest
from support.planning.small_machine import SmallMachine

from configs.schema import RunConfig
from flows.planning.chart import chart, splits
from flows.planning.formatting import as_markdown, table_rows
from millrace.planning.plan import Plan, make_plan, what_if
from millrace.planning.search import simulator

CONFIG = RunConfig.model_validate(
    {
        "training": {"max_steps": 3, "groups_per_step": 16, "max_tokens_per_microbatch": 4096},
        "generation": {"engine": "vllm", "group_size": 4, "max_new_tokens": 128},
    }
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CONFIG, SmallMachine(), simulator(10), gpus=8, goal="fastest")


def test_the_chart_has_a_line_per_size_of_a_generator_and_the_winner_on_one_of_them(plan: Plan) -> None:
    lines = splits(plan)
    winner = plan.chosen
    assert winner.outcome is not None
    line = dict(lines[f"TP {winner.generator_tensor}"])
    assert line[winner.trainer_gpus] <= winner.outcome.step_seconds * 1.001
    assert all([x for x, _ in points] == sorted(x for x, _ in points) for points in lines.values())
    assert "data:image/svg+xml;base64," in (chart(plan) or "")


def test_a_comparison_of_two_configs_has_no_chart() -> None:
    made = what_if(CONFIG, CONFIG, {}, SmallMachine(), simulator(10))
    assert chart(made) is None
    assert "as it is" in as_markdown(made, None)


def test_as_markdown_a_plan_has_its_figures_runners_up_and_assumptions(plan: Plan) -> None:
    shown = as_markdown(plan, chart(plan))
    for part in (
        "| trainer GPUs |",
        "## Settings",
        "## Runners-up",
        f"1. {plan.entries[1].reason}",
        "## Assumptions",
        "![Seconds per step",
    ):
        assert part in shown
    # Every row of a table has as many cells as its header.
    for block in shown.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1


def test_the_table_lists_everything_that_was_simulated_with_its_bottleneck(plan: Plan) -> None:
    rows = table_rows(plan)
    assert len(rows) == len(plan.simulated)
    assert all(row["bottleneck"] for row in rows)
