"""The arithmetic of the report; the campaigns themselves are run by hand."""

from benchmarks.start import report


def test_the_report_holds_medians_over_the_campaigns() -> None:
    campaigns = [
        {
            "first_step_seconds": seconds,
            "cpu_seconds": {"controller": 2.0, "train-0": seconds / 2},
            "pss_bytes": {"controller": 100, "train-0": int(seconds)},
        }
        for seconds in (10.0, 30.0, 12.0)
    ]
    result = report(campaigns)
    assert result["first_step_seconds"] == {"median": 12.0, "each": [10.0, 30.0, 12.0]}
    assert result["cpu_seconds"]["median"] == 2.0 + 6.0
    assert result["pss_bytes"] == {"median": 112, "each": [110, 130, 112]}
    assert result["processes"]["train-0"] == {"cpu_seconds": 6.0, "pss_bytes": 12}
