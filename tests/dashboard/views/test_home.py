"""A run's home page: four charts below each other that share one x axis, by version or by wall time."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.pages.run_data import STATUS, T, consumed_rows, measured, run_data, with_config

from dashboard.read.model import RunData
from dashboard.views.display import Display, displayed
from dashboard.views.home import HOME, checkpoints, restarts, step_phases
from dashboard.views.learning import VIEW as LEARNING
from millrace.evaluation.promotion import PromotionDecision


def _run(**changes: Any) -> RunData:
    """Twenty steps of a second each; the trainer waits a quarter of the time. A checkpoint in the tenth."""
    trainer = {
        "reward_mean": measured([0.0] * 10 + [1.0] * 10),
        "staleness_mean": measured([1.0] * 20),
        "staleness_max": measured([1.0] * 20),
        "importance_ratio_p95": measured([1.1] * 20),
        "effective_sample_size": measured([0.9] * 20),
        "time/train/seconds": measured([0.75] * 20),
        "time/waiting for scored groups/seconds": measured([0.25] * 20),
        "time/checkpoint/seconds": measured([0.0] * 9 + [0.1] + [0.0] * 10),
    }
    consumed = consumed_rows(range(1, 21), staleness=1)
    return run_data(**{"metrics": {"train-0": trainer}, "consumed": consumed, **changes})


@pytest.mark.parametrize("by_time", [False, True])
def test_the_four_charts_share_their_x_axis_and_each_has_its_own_y(by_time: bool) -> None:
    figure = displayed(HOME.blocks[0].build([_run()]), Display(smoothing=1, by_time=by_time), [_run()])
    assert {trace.xaxis for trace in figure.data} == {"x"}
    assert {trace.yaxis for trace in figure.data} == {"y", "y2", "y3", "y4"}


def test_a_run_that_has_hardly_begun_says_so_in_each_chart() -> None:
    nothing = {name: np.empty(0) for name in ("policy_version", "accuracy", "accuracy_low", "accuracy_high")}
    figure = HOME.blocks[0].build(
        [run_data(status=None, stage_status={}, metrics={}, consumed=consumed_rows([]), evaluations=nothing)]
    )
    assert sum(note.text.endswith(".") for note in figure.layout.annotations) == 4


def test_the_seconds_of_a_step_are_split_by_phase() -> None:
    phases = step_phases(_run())
    assert phases["train"].y == pytest.approx([0.75] * 18)
    assert phases["waiting for scored groups"].y == pytest.approx([0.25] * 18)


def test_a_step_that_is_not_finished_is_not_in_the_seconds_per_step() -> None:
    rows = {"train": [8.0, 8.0, 8.0, 2.0]}
    columns = measured(rows["train"])
    phases = step_phases(_run(metrics={"train-0": {"time/train/seconds": columns}}))
    assert phases["train"].y.tolist() == [8.0, 8.0]


def test_a_box_has_at_most_four_rows_and_the_labels_have_the_styles_of_the_lines() -> None:
    kinds = ("train", "handover", "checkpoint", "loading", "probe", "waiting for scored groups")
    times = {f"time/{kind}/seconds": measured([0.1 * number] * 20) for number, kind in enumerate(kinds, start=1)}
    run = _run()
    figure = HOME.blocks[0].build([replace(run, metrics={"train-0": {**run.metrics["train-0"], **times}})])
    rows = Counter(trace.yaxis for trace in figure.data if trace.hoverinfo != "skip")
    assert rows["y4"] == 4 == max(rows.values())
    staleness = next(note.text for note in figure.layout.annotations if "Staleness" in note.text)
    assert "━━</span> mean" in staleness and "•••</span> largest" in staleness


def test_supervised_fine_tuning_shows_its_loss_and_no_ratios() -> None:
    run = with_config(_run(), {"prompts": {"demonstrations": True}})
    figure = HOME.blocks[0].build([run])
    titles = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    assert [title.partition("</b>")[0] for title in titles] == ["<b>Loss", "<b>Accuracy", "<b>Seconds per step"]
    assert not {"learning-ratio", "learning-clip-fraction"} & {block.id for block in LEARNING.blocks_for([run])}


def test_restarts_and_checkpoints_are_marked_at_their_versions() -> None:
    again = {"t": T - 5.0, "kind": "stage.restarted", "sentence": "score-0 was started again", "stage": "score-0"}
    run = _run(status={**STATUS, "incidents": {"latest": [again, {**again, "kind": "probe.alarm", "t": T - 9}]}})
    assert restarts(run) == [15]
    assert checkpoints(run).tolist() == [10.0]
    resumed = replace(run.info.attempts[0], number=1, t_started=T - 8.0, first_step=12)
    info = replace(run.info, attempts=(run.info.attempts[0], resumed))
    assert restarts(replace(run, info=info)) == [12, 15]
    figure = HOME.blocks[0].build([run])
    assert [shape.x0 for shape in figure.layout.shapes] == [15.0]


def test_a_changed_config_is_marked_at_the_version_that_the_run_resumed_from() -> None:
    run = _run()
    resumed = replace(
        run.info.attempts[0], number=1, t_started=T - 8.0, first_step=10, changes=("seed <b>was</b> 1 and is 2",)
    )
    run = replace(run, info=replace(run.info, attempts=(run.info.attempts[0], resumed)))
    figure = HOME.blocks[0].build([run])
    assert [shape.x0 for shape in figure.layout.shapes] == [10.0]
    # The tenth step was done ten seconds before the last look, fifty after the start.
    by_time = displayed(HOME.blocks[0].build([run]), Display(smoothing=1, by_time=True), [run])
    assert [shape.x1 for shape in by_time.layout.shapes] == [pytest.approx(50 / 60)]
    assert [note.x for note in by_time.layout.annotations if note.hovertext] == [pytest.approx(50 / 60)]
    assert "seed &lt;b&gt;was&lt;/b&gt; 1 and is 2" in [note.hovertext for note in figure.layout.annotations]


def test_a_promoted_version_has_a_star_on_its_accuracy() -> None:
    run = _run()
    decision = PromotionDecision(promoted=True, policy_version=2, accuracy=0.5, sentence="better", bar=0.25)
    attempt = replace(run.info.attempts[0], promotion=decision)
    run = replace(run, info=replace(run.info, attempts=(attempt,)))
    (star,) = [trace for trace in HOME.blocks[0].build([run]).data if trace.name == "promoted"]
    assert (list(star.x), list(star.y)) == ([2.0], [0.5])
