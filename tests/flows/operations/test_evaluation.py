"""The table of a run's evaluations."""

from flows.operations.evaluate import table_rows


def test_an_estimate_is_one_cell_with_its_interval() -> None:
    measured = {
        "policy_version": 4,
        "accuracy": 0.5,
        "accuracy_interval": [0.4, 0.6],
        "prompts": 9,
        "samples": 2,
        "pass_at": {"1": {"value": 0.25, "low": 0.2, "high": 0.3}, "2": {"value": 0.5, "low": 0.4, "high": 0.6}},
        "majority": {"value": 1.0, "low": 0.7, "high": 1.0},
    }
    assert table_rows({"end": measured}) == [
        {
            "evaluated": "end",
            "policy_version": 4,
            "accuracy": "0.5000 [0.4000, 0.6000]",
            "prompts": 9,
            "samples": 2,
            "pass@1": "0.2500 [0.2000, 0.3000]",
            "pass@2": "0.5000 [0.4000, 0.6000]",
            "majority": "1.0000 [0.7000, 1.0000]",
        }
    ]
