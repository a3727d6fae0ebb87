"""The groups that a generator is working on: admitted in order, finished in any order, handed on when they are whole.

    admit 7, 8, 9 ─► engine ─► 9 done, 7 done ─► take: 9, 7        8 is unfinished, and nothing waits for it
                               8 done         ─► take: 8

A response may be interrupted, when the generator is drained or the trainer was rolled back, and go on later, perhaps
in another process. `interrupted` gives what the responses in flight have so far, and `admit` goes on with it: the
engine is asked for the rest alone, and `add` joins the pieces.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millrace.types import Prompt, Request, Trajectory


@dataclass(kw_only=True)
class _Group:
    policy_version: int
    """Of the oldest weights that may have sampled a token of it."""
    t_admitted: float
    asked: dict[int, Request] = field(default_factory=dict)
    """Place in the group → what the engine was asked for, or will be."""
    begun: dict[int, Trajectory] = field(default_factory=dict)
    """Place in the group → what an unfinished response had when it was asked for."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Place in the group → a whole response."""

    def responses(self) -> dict[int, Trajectory]:
        return {**self.begun, **self.finished}


class GroupsInFlight:
    """Groups of `group_size` trajectories each. `run_seed` is the run's seed."""

    def __init__(self, group_size: int, run_seed: int) -> None:
        self._group_size = group_size
        self._run_seed = run_seed
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        """Groups admitted and not taken yet."""
        return len(self._groups)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that may have sampled a token of a group in flight; None if there is none."""
        return min((group.policy_version for group in self._groups.values()), default=None)

    @property
    def t_oldest(self) -> float | None:
        """When the first of the groups in flight was admitted, unix seconds; None if there is none."""
        return min((group.t_admitted for group in self._groups.values()), default=None)

    @property
    def tokens(self) -> int:
        """Response tokens of the finished members, and those that unfinished ones had when they were asked for."""
        return sum(len(one.response.tokens) for group in self._groups.values() for one in group.responses().values())

    def admit(
        self,
        group_id: int,
        prompt: Prompt,
        prompt_tokens: tuple[int, ...],
        policy_version: int,
        t_admitted: float,
        begun: Mapping[int, Trajectory] | None = None,
        message_starts: tuple[tuple[str, int], ...] = (),
    ) -> list[Request]:
        """The group's requests for the engine.

        `policy_version` is that of the weights, `t_admitted` is in unix seconds. `begun` are its responses of an
        earlier time by their place, finished or not: those are not asked for again, or for their rest only.
        `message_starts` are those of the prompt.
        """
        begun = begun or {}
        versions = [version for one in begun.values() for version, _ in one.response.version_spans]
        group = _Group(
            policy_version=min([policy_version, *versions]),
            t_admitted=min([t_admitted, *(one.request.t_admitted for one in begun.values())]),
        )
        for i in range(self._group_size):
            request = Request(
                group_id=group_id,
                sample_index=i,
                prompt_tokens=prompt_tokens,
                seed=trajectory_seed(self._run_seed, group_id, i),
                prompt=prompt,
                message_starts=message_starts,
                t_admitted=group.t_admitted,
            )
            if i not in begun:
                group.asked[i] = request
                continue
            earlier = replace(begun[i], request=request)
            if earlier.response.finish_reason != "unfinished":
                group.finished[i] = earlier
                continue
            group.begun[i] = earlier
            tokens = earlier.response.tokens
            group.asked[i] = replace(request, response_tokens=tokens, seed=derived_seed(request.seed, len(tokens)))
        self._groups[group_id] = group
        return list(group.asked.values())

    def add(self, trajectory: Trajectory) -> Trajectory:
        """Adds one finished trajectory of an admitted group, and returns the whole of it."""
        group, place = self._groups[trajectory.request.group_id], trajectory.request.sample_index
        group.finished[place] = _joined(group.begun.get(place), trajectory)
        return group.finished[place]

    def take(self) -> list[Trajectory]:
        """The trajectories of all groups that are whole, in the order in which the groups were admitted."""
        taken: list[Trajectory] = []
        for group_id, group in list(self._groups.items()):
            if len(group.finished) == self._group_size:
                taken += [group.finished[i] for i in range(self._group_size)]
                del self._groups[group_id]
        return taken

    def interrupted(self, from_engine: Iterable[Trajectory]) -> list[Trajectory]:
        """Forgets all groups; returns every response of theirs that has a token, finished or not.

        `from_engine` is what the engine had of the requests that were in flight.
        """
        for trajectory in from_engine:
            group, place = self._groups[trajectory.request.group_id], trajectory.request.sample_index
            whole = _joined(group.begun.get(place), trajectory)
            kept = group.begun if whole.response.finish_reason == "unfinished" else group.finished
            kept[place] = whole
        found = [one for group in self._groups.values() for one in group.responses().values()]
        self._groups.clear()
        return [one for one in found if one.response.tokens]


def _joined(begun: Trajectory | None, rest: Trajectory) -> Trajectory:
    """A response and its continuation as one; `begun` is None if there is nothing before."""
    if begun is None:
        return rest
    response = begun.response.followed_by(rest.response)
    return Trajectory(request=begun.request, response=response, t_started=begun.t_started, t_finished=rest.t_finished)


def num_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Response tokens of them all."""
    return sum(len(trajectory.response.tokens) for trajectory in trajectories)


def trajectory_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """63 bits from the run's seed and the trajectory's place, so that a repeated request draws the same tokens."""
    return derived_seed(run_seed, group_id, sample_index)


def derived_seed(*numbers: int) -> int:
    """63 bits that depend on all the numbers and their order."""
    digest = hashlib.sha256(":".join(str(number) for number in numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
