"""The arithmetic of the benchmark of long tails."""

import pytest

from benchmarks.long_tail import MODES, LongTailCase, Mode, expect, targets_met


def case(mode: Mode = "drop", *, sigma: float = 1.0, batches: int = 1) -> LongTailCase:
    return LongTailCase(sigma=sigma, max_staleness=4, groups_per_step=16, groups_per_batch=16 * batches, mode=mode)


def test_without_a_tail_nothing_is_lost_in_any_mode() -> None:
    for mode in MODES:
        result = expect(case(mode, sigma=0.01), steps=60, warmup=20)
        assert result["share"] == pytest.approx(1.0, abs=0.02)
        assert (result["dropped_share"], result["masked_token_share"]) == (0.0, 0.0)


def test_each_mode_pays_for_stragglers_in_its_own_way() -> None:
    drop, wait, mask, keep = (expect(case(mode), steps=120, warmup=20) for mode in MODES)
    assert drop["dropped_share"] > 0 and drop["length_ratio"] < 0.95
    assert wait["share"] < drop["share"] and wait["length_ratio"] == pytest.approx(1.0)
    assert mask["masked_token_share"] > 0 and 1.0 < mask["length_ratio"] < 1.05
    assert drop["staleness_max"] == wait["staleness_max"] == mask["staleness_max"] == 4
    assert (keep["dropped_share"], keep["masked_token_share"], keep["length_ratio"]) == (0, 0, pytest.approx(1.0))
    assert keep["share"] == mask["share"] and keep["loss_share"] > mask["loss_share"]
    assert keep["staleness_max"] > 4 >= keep["staleness_mean"]


def test_a_target_is_met_by_a_mode_that_wastes_little_in_every_case_and_prefers_no_length() -> None:
    def row(mode: str, loss_share: float, length_ratio: float) -> dict[str, object]:
        figures = {"loss_share": loss_share, "length_ratio": length_ratio}
        return {"sigma": 0.6, "mode": mode, "expected": {}, "measured": figures}

    name = "σ = 0.6: 95% of the capacity has loss, lengths within 1%"
    rows = [row("drop", 0.99, 0.9), row("wait", 0.7, 1.0), row("mask", 0.7, 1.0), row("mask", 0.99, 1.0)]
    assert targets_met([*rows, row("keep", 0.94, 1.0)])[f"{name} (no mode)"] is False
    assert targets_met([*rows, row("keep", 0.96, 0.995)])[f"{name} (keep)"] is True
