"""How fast a trainer makes its steps."""

from millrace.runtime.metrics import Pace


def test_the_first_step_only_starts_the_clock_because_it_waited_for_the_pipeline_to_fill() -> None:
    ends = iter((100.0, 103.0, 108.0))
    pace = Pace(lambda: next(ends))
    assert pace.step(50) == {}
    assert pace.step(60) == {"step_seconds": 3.0, "tokens_per_second": 20.0}
    assert pace.step(100) == {"step_seconds": 4.0, "tokens_per_second": 20.0}
