"""Charts and tables of a run with several sources have a figure for each of them."""

from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from support.stored_run.run import StoredRun

from dashboard.pages.site import VIEWS
from dashboard.queries.series import measured
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows
from dashboard.views.home import HOME
from dashboard.views.ledger import newest_drops, recount

_BLOCKS = {block.id: block for view in (HOME, *VIEWS) for block in view.blocks}


def names(block: str, *runs: RunData) -> list[str]:
    """The lines of a chart, or the first cells of a table."""
    shown = _BLOCKS[block].build(runs)
    return [row[0] for row in shown.rows] if isinstance(shown, Rows) else [trace.name for trace in shown.data]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("home-charts", {"math", "words"}),
        ("learning-reward", {"math", "words"}),
        ("learning-accuracy", {"math", "words"}),
        ("learning-sources", {"math", "words"}),
        ("learning-zero-advantage-share", {"math", "words"}),
        ("learning-response-length-mean-tokens", {"math", "words"}),
        ("learning-truncated-share", {"math", "words"}),
        ("learning-lengths", {"math, p90", "words, p90"}),
        ("learning-reward-spread", {"math, mean", "words, mean"}),
        ("staleness-over-time", {"math, mean", "words, mean"}),
        ("staleness-ratios", {"math, length", "words, length"}),
        ("staleness-bias", {"math: mean length", "words: mean length"}),
        ("staleness-outcomes", {"math: trained", "words: trained"}),
        ("ledger-recount", {"math: trained", "words: trained", "math: stale", "words: stale"}),
    ],
)
def test_each_source_has_a_figure_next_to_that_of_the_run(
    block: str, expected: set[str], mixture: RunData, stored_run: StoredRun, watch: Callable[..., Callable[[], RunData]]
) -> None:
    of_one_source = watch(stored_run.store)()
    assert set(names(block, mixture)) - set(names(block, of_one_source)) >= expected
    assert not expected & set(names(block, of_one_source))


def test_several_runs_are_compared_without_lines_of_their_sources(mixture: RunData) -> None:
    assert len(names("learning-reward-spread", mixture, replace(mixture))) == 2


def test_a_line_of_a_source_is_its_metric_in_the_same_colour_on_every_chart(mixture: RunData) -> None:
    colours = set()
    for block, metric in (
        ("learning-reward", "reward_mean/math"),
        ("learning-truncated-share", "truncated_share/math"),
    ):
        figure = _BLOCKS[block].build([mixture])
        assert isinstance(figure, go.Figure)
        (line,) = [trace for trace in figure.data if trace.name == "math"]
        assert list(line.y) == measured(mixture, metric).y.tolist()
        assert figure.layout.showlegend
        colours.add(line.line.color)
    assert len(colours) == 1


def test_a_metric_that_sources_do_not_have_is_one_line_without_a_legend(mixture: RunData) -> None:
    figure = _BLOCKS["learning-entropy"].build([mixture])
    assert isinstance(figure, go.Figure)
    assert (len(figure.data), figure.layout.showlegend) == (1, False)


def test_the_table_of_sources_has_their_weights_and_times(mixture: RunData) -> None:
    table = _BLOCKS["learning-sources"].build([mixture])
    assert isinstance(table, Rows)
    for row in table.rows:
        assert {"weight": "1.00", "a response takes, s": "0.50", "its score takes, s": "0.010"}.items() <= dict(
            zip(table.header, row, strict=True)
        ).items()


def test_the_shares_of_the_sources_are_of_the_trained_groups(mixture: RunData) -> None:
    table = _BLOCKS["learning-sources"].build([mixture])
    assert isinstance(table, Rows)
    shares = {row[0]: float(row[table.header.index("groups")].removesuffix(" %")) for row in table.rows}
    assert sum(shares.values()) == pytest.approx(100, abs=0.1)
    assert shares["math"] == pytest.approx(50, abs=10)


def test_the_ledger_of_each_source_agrees_with_its_rows_and_a_lost_rollout_is_noticed(mixture: RunData) -> None:
    result = recount(mixture)
    assert result is not None and result.agrees
    status = mixture.stage_status["train-0"]
    lost = {**status["sources"]["math"], "trained": {"rollouts": 1, "tokens": 1}}
    damaged = {**status, "sources": {**status["sources"], "math": lost}}
    result = recount(replace(mixture, stage_status={**mixture.stage_status, "train-0": damaged}))
    assert result is not None and not result.agrees
    assert [name for name, (account, rows) in result.entries.items() if account != rows] == ["math: trained"]


def test_a_dropped_group_names_its_source(mixture: RunData) -> None:
    assert {row[3].rpartition(", ")[2] for row in newest_drops(mixture)} == {"math", "words"}
    table = _BLOCKS["ledger-drops"].build([mixture])
    assert isinstance(table, Rows)
    assert all(row[3].endswith((", math", ", words")) for row in table.rows)
