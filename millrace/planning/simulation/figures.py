"""From what a simulated campaign did to its figures."""

from array import array
from collections.abc import Mapping

import numpy as np

from millrace.planning.simulation.clock import StageTimes, WallClock
from millrace.planning.simulation.outcome import Outcome


class FreePlaces:
    """Places of generators that hold no request, over time; `exact`: each time is known, and not only their sum."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self._earlier = 0.0
        self.place_seconds = 0.0
        """Their sum since it was last cleared."""
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._earlier += self.place_seconds
        self.place_seconds = 0.0
        self._begins, self._ends, self._places = array("d"), array("d"), array("d")

    def count(self, begin: float, end: float, places: int) -> None:
        """So many places were free meanwhile."""
        self.place_seconds += places * (end - begin)
        if not self.exact:
            return
        self._begins.append(begin)
        self._ends.append(end)
        self._places.append(places)

    @property
    def total(self) -> float:
        """Place-seconds since the beginning, by the clock of the work."""
        return self._earlier + self.place_seconds

    def seconds(self, clock: WallClock) -> float:
        """Summed over the places, since it was last cleared."""
        if not self.exact:
            return self.place_seconds
        lasted = clock.at(self._ends) - clock.at(self._begins)
        return float(lasted @ np.asarray(self._places))


class Tally:
    """Sums over what the trainer took since the warm-up."""

    def __init__(self) -> None:
        self.clear(0.0)

    def clear(self, t: float) -> None:
        """The warm-up has ended at `t`."""
        self._begin = t
        self._taken_rollouts = self._taken_tokens = 0
        self._trained_rollouts = self._trained_tokens = self._masked_tokens = 0
        self._staleness_sum = self._staleness_max = 0
        self._t_ready, self._t_taken = array("d"), array("d")

    def wait(self, t_ready: float, t: float) -> None:
        """A group has been waiting since `t_ready`."""
        self._t_ready.append(t_ready)
        self._t_taken.append(t)

    def take(self, rollouts: int, tokens: int) -> None:
        """A group is taken; `tokens` of its responses."""
        self._taken_rollouts += rollouts
        self._taken_tokens += tokens

    def train(self, rollouts: int, tokens: int, staleness: int, masked_tokens: int = 0) -> None:
        """So much of the group is trained on."""
        self._trained_rollouts += rollouts
        self._trained_tokens += tokens
        self._masked_tokens += masked_tokens
        self._staleness_sum += staleness * rollouts
        self._staleness_max = max(self._staleness_max, staleness)

    def outcome(
        self,
        *,
        steps: int,
        t_end: float,
        stages: Mapping[str, StageTimes],
        free: FreePlaces,
        places: int,
        clock: WallClock,
    ) -> Outcome:
        """The figures of so many steps, the last of which ended at `t_end`.

        The generators have so many `places`, of which some were `free` since the warm-up.
        """
        begin, end = clock.at([self._begin, t_end]).tolist()
        taken_length = self._taken_tokens / self._taken_rollouts
        queued = clock.at(self._t_taken) - np.maximum(clock.at(self._t_ready), begin)
        return Outcome(
            steps=steps,
            step_seconds=(end - begin) / steps,
            tokens_per_second=self._trained_tokens / (end - begin),
            staleness_mean=self._staleness_sum / self._trained_rollouts,
            staleness_max=self._staleness_max,
            dropped_share=1 - self._trained_rollouts / self._taken_rollouts,
            masked_token_share=self._masked_tokens / self._trained_tokens,
            length_ratio=self._trained_tokens / self._trained_rollouts / taken_length,
            idle={name: _idle_share(stage, begin, end, clock) for name, stage in stages.items()},
            places_taken=1 - free.seconds(clock) / (places * (end - begin)),
            queued_groups=float(queued.sum()) / (end - begin),
        )


def _idle_share(stage: StageTimes, begin: float, end: float, clock: WallClock) -> float:
    begins, ends = (np.clip(clock.at(times), begin, end) for times in stage.ends())
    return float((ends - begins).sum()) / (stage.replicas * (end - begin))
