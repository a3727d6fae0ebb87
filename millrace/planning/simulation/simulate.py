"""The pipeline in simulated time: what a config comes to, if everything takes as long as a cost model says.

    generators ─► finished groups ─► parts ─► scorers ─► ready groups ─► trainer ─► step ─► version ─► generators
        ▲                                                                  └─► dropped ─► room ─┐
        └───────────────────────────────────────────────────────────────────────────────────────┘

While the trainer is in a step nothing reaches a generator but what is on the agenda already, so each is simulated on
its own up to the next event there: that is what makes it fast. While the trainer waits for groups, the generators are
simulated ahead of it by a guess at how long the next step takes. A step that is shorter than the guess would have
reached them earlier: then all is simulated again without guesses, every event in its order.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from configs.schema import RunConfig
from millrace.planning.simulation.campaign import Campaign, TooFarAheadError
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.faults import Faults, with_trainer_failures
from millrace.planning.simulation.lengths import Lengths
from millrace.planning.simulation.outcome import Outcome, Trace

_AHEAD = 0.7
"""Of the shortest of the last steps: so far ahead of a trainer that waits may a generator be."""


def simulate(
    config: RunConfig,
    costs: Costs,
    lengths: Lengths,
    *,
    steps: int,
    warmup: int,
    slots: int | None = None,
    faults: Faults | None = None,
    trace: Trace | None = None,
    later: Mapping[int, Costs] | None = None,
    drift: float = 0.0,
) -> Outcome:
    """What the campaign comes to in `steps` steps, the first `warmup` of which do not count.

    `slots`: how many requests a generator's memory lets it decode at once, if that is less than it has in flight.
    `later`: costs that take over when a version is made. `drift`: χ² of the policies that sample and train, per
    squared version of staleness, by which adaptive control goes.
    With `faults`, times per step are those of all steps; a trainer's failures are in no other figure, nor in the trace.
    A trace gets every admission and step added. Deterministic. Raises ValueError if no step is left to count, or if a
    cost is no duration.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"{steps} steps with {warmup} of warm-up leave none to count")
    trace = Trace() if trace is None and faults is not None else trace
    campaign = partial(Campaign, config, costs, lengths, slots, faults, trace, later=later or {}, drift=drift)
    try:
        outcome = campaign(ahead=_AHEAD).run(steps, warmup)
    except TooFarAheadError:
        outcome = campaign(ahead=0.0).run(steps, warmup)
    if faults is None or trace is None or faults.trainer_mtbf == math.inf:
        return outcome
    t_made = [step.t for step in trace.trained[-steps:]]
    seconds, failures = with_trainer_failures(t_made, config.training.checkpoint_every, faults)
    factor = seconds / t_made[-1]
    return replace(
        outcome,
        step_seconds=outcome.step_seconds * factor,
        tokens_per_second=outcome.tokens_per_second / factor,
        restarts={**outcome.restarts, "train": failures},
    )
