"""What the staleness study makes of campaigns; the campaigns themselves are run by hand."""

from pathlib import Path

import pytest

from benchmarks.staleness_study.__main__ import medians
from benchmarks.staleness_study.plots import write_plots


def row(seed: int, accuracy: float | None, *, loss: str = "aipo", bound: int = 4) -> dict[str, object]:
    return {
        "loss": loss,
        "max_staleness": bound,
        "seed": seed,
        "accuracy": accuracy,
        "staleness_mean": None if accuracy is None else 3.5,
        "effective_sample_size": None if accuracy is None else 0.9,
        "chi_square": None if accuracy is None else 0.05,
        "seconds_per_step": None if accuracy is None else 0.25,
        "reward_mean": [0.1, 0.2, 0.4],
    }


def test_the_median_is_over_seeds_and_a_campaign_that_diverged_has_no_accuracy() -> None:
    (cell,) = medians([row(0, 0.8), row(1, None), row(2, 0.6)])
    assert cell["accuracy"] == pytest.approx(0.6)
    assert (cell["accuracy_lowest"], cell["accuracy_highest"]) == (0.0, 0.8)
    assert cell["effective_sample_size"] == pytest.approx(0.9)
    assert cell["chi_square"] == pytest.approx(0.05)
    assert cell["seeds"] == 3


@pytest.mark.slow
def test_the_plots_of_the_same_figures_are_the_same_files(tmp_path: Path) -> None:
    rows = [row(0, 0.8), row(0, 0.3, loss="reinforce"), row(0, 0.7, bound=8), row(0, None, loss="reinforce", bound=8)]
    for name in ("once", "again"):
        write_plots(medians(rows), rows, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == ["staleness-bound.svg", "staleness-reward.svg"]
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
