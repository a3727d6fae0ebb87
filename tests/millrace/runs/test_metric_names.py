"""Names of metrics in runs that earlier versions stored."""

import pytest

from millrace.runs.history import TIME_METRICS, current_name


@pytest.mark.parametrize(
    ("stored", "today"),
    [
        ("lane/intake/seconds", "time/loading/seconds"),
        ("lane/waiting for room/seconds", "time/waiting for room/seconds"),
        ("time/loading/seconds", "time/loading/seconds"),
        ("total/tokens", "total/tokens"),
        ("push_seconds", "push_seconds"),
    ],
)
def test_a_stored_name_has_one_name_today(stored: str, today: str) -> None:
    assert current_name(stored) == today
    assert stored.startswith(TIME_METRICS) == today.startswith(TIME_METRICS)
