"""What a simulated step measured, as a trainer's controller gets it."""

from collections.abc import Sequence

from millrace.control.measured import Reading
from millrace.planning.simulation.engine import Generator
from millrace.planning.simulation.shared import Shared
from millrace.planning.simulation.trainer import Trainer


def reading_of(
    trainer: Trainer, generators: Sequence[Generator], shared: Shared, *, now: float, waited: float, drift: float
) -> Reading:
    """Of the step on the groups that the trainer holds, which ends now; it has waited so many seconds so far."""
    for generator in generators:
        generator.count_free_places(now)
    ess, length_ratio, steps_ready = trainer.measured(drift)
    return Reading(
        effective_sample_size=ess,
        length_ratio=length_ratio,
        steps_ready=steps_ready,
        trainer_waited=waited,
        trainer_seconds=now,
        generators_waited=shared.free_places.total / shared.places,
        generators_seconds=len(generators) * now,
    )
