"""The pipeline as it is now: busy stages, queues, the bottleneck; when start models and evaluations were made."""

from typing import Any

import numpy as np
import pytest
from support.pages.components import words
from support.pages.run_data import T, measured, run_data

from dashboard.pages.frame import picture
from dashboard.queries.flow import occasional_tracks
from dashboard.read.model import Columns, RunData


def _run(**changes: Any) -> RunData:
    """The trainer is always busy, the generators wait half of the time; scored rollouts have doubled."""
    times = {"time/train/seconds": measured([1.0] * 40), "buffered_rollouts": measured([8.0] * 20 + [16.0] * 20)}
    generating = {
        "time/generate/seconds": measured([0.5] * 40),
        "time/waiting for weights or room/seconds": measured([0.5] * 40),
        "total/tokens": measured([100.0 * step for step in range(40)]),
    }
    written = {"doing": "train", "seconds": {}, "t": T - 2}
    values: dict[str, Any] = {
        "metrics": {"train-0": times, "generate-0": generating, "generate-1": generating},
        "stage_status": {
            "train-0": written,
            "generate-0": written | {"t": T - 1, "devices": ["0", "1"]},
            "generate-1": written | {"t": T - 9, "doing": "generate", "devices": ["2", "3"]},
            "score-0": written | {"doing": "stopped"},
        },
    }
    return run_data(**{**values, **changes})


def stages(run: RunData) -> dict[str, str]:
    """The text of each stage and queue, by its first line."""
    return {part.children[0].children: words(part.children[1:]) for part in picture(run).children}


def test_each_stage_tells_how_busy_it_is_how_fast_and_when_it_was_heard_last() -> None:
    drawn = stages(_run())
    assert drawn["generate × 2"].startswith("50% busy, 200 tokens/s status 9 s ago")
    assert drawn["score"] == "busy – stopped"
    assert drawn["train"].startswith("bottleneck 100% busy")
    assert drawn["sync_weights"].split() == ["not", "started"]


@pytest.mark.parametrize(
    ("values", "arrow"),
    [([8.0] * 10 + [16.0] * 10, " ↑"), ([16.0] * 10 + [8.0] * 10, " ↓"), ([8.0] * 40, ""), ([8.0, 16.0], "")],
)
def test_a_queue_grows_or_shrinks_by_its_newest_steps_against_those_before(values: list[float], arrow: str) -> None:
    drawn = stages(_run(metrics={"train-0": {"buffered_rollouts": measured(values)}}))
    assert drawn[f"8{arrow} →"] == "scored, not taken"
    assert drawn["6 →"] == "not scored"


def test_the_picture_counts_and_names_the_gpus_of_a_stage() -> None:
    generate = picture(_run()).children[0]
    assert [(line.children, line.title) for line in generate.children if getattr(line, "title", None)] == [
        ("4 GPUs", "generate-0: 0, 1; generate-1: 2, 3")
    ]
    assert "GPU" not in stages(_run())["train"]


def test_the_picture_outlines_the_bottleneck() -> None:
    outlined = [part for part in picture(_run()).children if part.className == "stage bottleneck"]
    assert [part.children[0].children for part in outlined] == ["train"]
    assert len(picture(run_data(status=None, stage_status={}, metrics={})).children) == 7


def test_the_start_model_has_a_progress_bar_until_it_is_made() -> None:
    making = {"doing": "warm start step 120 of at most 2000", "t": T, "step": 120, "most_steps": 2000}
    earlier = picture(run_data(status=None, metrics={}, stage_status={"bootstrap-0": making})).children
    title, bar, doing = earlier[0].children
    assert (title.children, doing.children) == ("making the start model", making["doing"])
    assert (bar.value, bar.max) == ("120", "2000")
    older = {name: making[name] for name in ("doing", "t")}
    (_, bar, _) = picture(run_data(metrics={}, stage_status={"bootstrap-0": older})).children[0].children
    assert not hasattr(bar, "value"), "a bar that only moves"
    for status in ({"bootstrap-0": {**making, "doing": "stopped"}}, {"bootstrap-0": making, "train-0": making}):
        assert "making the start model" not in words(picture(run_data(metrics={}, stage_status=status)))


STARTED = T - 60
NAN = float("nan")


def evaluated(*results: tuple[float, float]) -> Columns:
    """When each ended, seconds after the run's start, and how many it took."""
    t, seconds = np.array(results, np.float64).reshape(-1, 2).T
    unknown = np.full(len(t), NAN)
    return {
        "policy_version": np.arange(len(t)), "accuracy": unknown, "accuracy_low": unknown, "accuracy_high": unknown,
        "num_prompts": np.arange(len(t)), "t": STARTED + t, "seconds": seconds,
    }  # fmt: skip


def tracks(**changes: Any) -> dict[str, list[tuple[float, float, float]]]:
    """(begin, end, share) of each interval, in seconds since the run's start, by track."""
    result = occasional_tracks(run_data(**{"stage_status": {}, "evaluations": evaluated(), **changes}))
    return {
        track.name: [
            (round(float(begin) * 60, 3), round(float(end) * 60, 3), float(share))
            for begin, end, share in zip(track.edges, track.edges[1:], track.shares[track.name], strict=False)
        ]
        for track in result
    }


def test_the_start_model_is_made_from_the_start_of_its_attempt_until_its_last_status() -> None:
    record = {"doing": "stopped", "attempt": 0, "t": STARTED + 8}
    assert tracks(stage_status={"bootstrap-0": record}) == {"bootstrap": [(0.0, 8.0, 1.0)]}
    for older in ({"t": STARTED - 1}, {"t": STARTED + 8, "attempt": 7}, {"doing": "stopped"}):
        assert tracks(stage_status={"bootstrap-0": older}) == {}


def test_an_evaluation_lasts_as_long_as_its_result_says_and_nothing_is_between_two() -> None:
    result = tracks(evaluations=evaluated((5, 4), (20, 10)))
    assert result == {"evaluate": [(1.0, 5.0, 1.0), (5.0, 10.0, 0.0), (10.0, 20.0, 1.0)]}
