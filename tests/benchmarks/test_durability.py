"""The arithmetic of the comparison; the campaigns themselves are run by hand."""

import pytest

from benchmarks.durability import compare


def test_the_cost_is_the_median_of_the_rounds() -> None:
    result = compare(on=[0.103, 0.26, 0.5], off=[0.1, 0.25, 0.1])
    assert result["costs"] == pytest.approx([0.03, 0.04, 4.0])
    assert result["cost"] == pytest.approx(0.04)
