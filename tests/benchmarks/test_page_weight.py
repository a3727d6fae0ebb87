"""The benchmark of the home page's weight measures what it says; the figures themselves are taken by hand."""

import shutil
from pathlib import Path

import pytest

from benchmarks.dashboard.page_weight import CONTENDERS, measure, targets_met


@pytest.mark.extended
@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="no Chromium is installed")
def test_compression_and_the_browsers_cache_make_the_page_lighter_and_a_plain_one_weighs_the_same_again(
    tmp_path: Path,
) -> None:
    loads = measure(tmp_path, runs=1, steps=20, rounds=1)["loads"]
    assert loads.keys() == set(CONTENDERS)
    served, plain = ({load: one["bytes"] for load, one in loads[name].items()} for name in ("as served", "plain"))
    assert served["again"] < served["first"] / 10
    assert served["first"] < plain["first"] / 2
    assert plain["again"] > plain["first"] / 2
    assert all(one["first_chart_seconds"] > 0 for some in loads.values() for one in some.values())


def test_a_target_is_met_or_missed_by_its_own_figure() -> None:
    def met(first: float, again: float, seconds: float) -> list[bool]:
        served = {"first": {"bytes": first, "first_chart_seconds": seconds}, "again": {"bytes": again}}
        return list(targets_met({"loads": {"as served": served}}).values())

    assert met(2e6, 1e5, 1.0) == [True, True, True]
    assert met(2.1e6, 1e5, 1.0) == [False, True, True]
    assert met(2e6, 1.1e5, 1.0) == [True, False, True]
    assert met(2e6, 1e5, 1.1) == [True, True, False]
