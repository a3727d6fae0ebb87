"""The rows that stand for other systems' published runs."""

from dataclasses import replace
from statistics import fmean

import pytest
from millrace.planning.costs.campaign import num_gpus

from benchmarks.planner.applied_compute import ROWS, StalenessRow
from benchmarks.planner.llamarl import CASES, waterfall
from benchmarks.planner.systems import Published, fitted_mfu, published_runs
from benchmarks.planner.workloads import cut_lengths


@pytest.mark.parametrize(("mean", "limit"), [(100, 4096), (3206, 3986)])
def test_lengths_that_are_cut_have_the_mean_that_was_asked_for(mean: int, limit: int) -> None:
    lengths = cut_lengths(prompt=10, mean=mean, sigma=0.6, limit=limit, group_size=8)
    drawn = [tokens for group in range(2000) for tokens in lengths.of_group(group)[1]]
    assert max(drawn) <= limit
    assert fmean(drawn) == pytest.approx(mean, rel=0.02)


def test_a_mean_above_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 100 tokens can't have 200"):
        cut_lengths(prompt=10, mean=200, sigma=0.6, limit=100, group_size=8)


def small(run: Published, seconds: float) -> Published:
    return replace(run, seconds=seconds)


@pytest.mark.slow
def test_the_mfu_of_a_system_is_found_again_in_its_own_predictions() -> None:
    runs = published_runs()[:2]
    made = [small(run, run.predicted(0.3)) for run in runs]
    assert fitted_mfu(made) == pytest.approx(0.3, rel=0.05)


def test_every_row_has_the_gpus_that_its_name_says() -> None:
    for run in published_runs():
        said = sum(int(word) for word in run.name.split(", ")[1].removesuffix(" GPUs").split(" + "))
        assert num_gpus(run.config) == said


def test_a_run_whose_generators_are_slower_has_the_staleness_of_its_time_in_flight() -> None:
    row = StalenessRow(concurrency=64, batch=64, queue=2, speed=0.5, tail=1.2, measured=1.0)
    assert row.formula == pytest.approx(1.7)
    assert row.predicted() == pytest.approx(row.formula, rel=0.1)


def test_rows_are_those_of_the_table() -> None:
    assert [row.measured for row in ROWS] == [1.26, 3.59, 3.09, 3.40, 1.92, 2.01]
    assert [row.bound for row in ROWS] == [3, 4, 3, 3, 2, 2]


def test_the_gains_of_a_waterfall_multiply_to_the_whole() -> None:
    rows = waterfall(CASES[0])
    product = 1.0
    for row in rows[:-1]:
        product *= row["gain"]
    assert product == pytest.approx(rows[0]["seconds"] / rows[-2]["seconds"])
    assert rows[-1]["seconds"] > rows[-2]["seconds"], "what is gathered takes longer"
