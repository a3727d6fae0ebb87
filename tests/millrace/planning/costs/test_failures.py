"""What failures cost on average."""

import pytest
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.failures import share_lost, trainer_faults
from millrace.planning.simulation.faults import Faults, with_trainer_failures


def test_a_trainer_fails_as_often_as_any_of_its_gpus() -> None:
    faults = trainer_faults(16_384, DEFAULTS)
    assert 54 * 86_400 / faults.trainer_mtbf == pytest.approx(419, rel=0.02), "Llama 3's 54 days"


@pytest.mark.parametrize(("mtbf", "recovery"), [(100.0, 0.0), (40.0, 10.0)])
def test_the_share_lost_is_that_of_a_long_campaign_simulated(mtbf: float, recovery: float) -> None:
    faults = Faults(trainer_mtbf=mtbf, trainer_recovery=recovery)
    seconds, _ = with_trainer_failures([float(step + 1) for step in range(20_000)], 10, faults)
    assert share_lost(1.0, 10, faults) == pytest.approx(1 - 20_000 / seconds, rel=0.1)


def test_a_trainer_that_never_fails_loses_nothing() -> None:
    assert share_lost(30.0, 10, Faults(trainer_mtbf=1e15)) == pytest.approx(0.0, abs=1e-9)
