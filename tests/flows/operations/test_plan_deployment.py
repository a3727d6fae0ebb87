"""A plan as titled tables in Markdown."""

from support.planning.small_machine import SmallMachine

from configs.schema import RunConfig
from flows.display.tables import for_markdown
from flows.operations.planning import sections
from millrace.planning.plan import Plan, what_if
from millrace.planning.search import make_plan, simulator

CONFIG = RunConfig.model_validate(
    {
        "training": {"max_steps": 3, "groups_per_step": 16, "max_tokens_per_microbatch": 4096},
        "generation": {"engine": "vllm", "group_size": 4, "max_new_tokens": 128},
    }
)


def as_markdown(plan: Plan) -> str:
    return "\n\n".join(map(for_markdown, sections(plan)))


def test_a_comparison_of_two_configs_shows_both() -> None:
    assert "as it is" in as_markdown(what_if(CONFIG, CONFIG, {}, SmallMachine(), simulator(10)))


def test_the_markdown_has_figures_runners_up_and_assumptions() -> None:
    text = as_markdown(make_plan(CONFIG, SmallMachine(), simulator(10), gpus=8, goal="fastest"))
    for part in ("| trainer GPUs |", "| on one host |", "## settings", "## runners-up", "\n- 1: ", "## assumptions"):
        assert part in text
    # Every row of a table has as many cells as its header.
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1
