"""The groups that a generator is working on: admitted in order, finished in any order, committed when complete.

    admit 7, 8, 9 ─► engine ─► 9 done, 7 done ─► take: 9, 7        8 is unfinished; nothing waits for it
                               8 done         ─► take: 8

A response is interrupted when the generator drains or the trainer is rolled back, and may continue later, perhaps in
another process. `interrupt` returns the tokens sampled so far, and `admit` continues from them: the engine samples only
the rest, and `add` joins the pieces.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from millrace.types import Prompt, Request, Trajectory


@dataclass(kw_only=True)
class _Group:
    size: int
    """Responses of the whole group."""
    policy_version: int
    """Oldest weights that may have sampled a token of the group."""
    t_admitted: float
    requests: dict[int, Request] = field(default_factory=dict)
    """Sample index → request to the engine."""
    begun: dict[int, Trajectory] = field(default_factory=dict)
    """Sample index → unfinished response that the request continues."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Sample index → whole response."""

    def responses(self) -> dict[int, Trajectory]:
        return {**self.begun, **self.finished}


class GroupsInFlight:
    """Groups of trajectories. `run_seed` is the run's seed."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        """Groups admitted and not taken yet."""
        return len(self._groups)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that may have sampled a token of a group in flight; None without groups."""
        return min((group.policy_version for group in self._groups.values()), default=None)

    @property
    def t_oldest(self) -> float | None:
        """Time at which the first of the groups in flight was admitted, unix seconds; None without groups."""
        return min((group.t_admitted for group in self._groups.values()), default=None)

    @property
    def tokens(self) -> int:
        """Response tokens of the finished members, and those that unfinished members began with."""
        return num_tokens(member for group in self._groups.values() for member in group.responses().values())

    def admit(
        self,
        group_id: int,
        prompt: Prompt,
        prompt_tokens: tuple[int, ...],
        policy_version: int,
        t_admitted: float,
        begun: Mapping[int, Trajectory] | None = None,
        message_starts: tuple[tuple[str, int], ...] = (),
        *,
        source: str,
        group_size: int,
    ) -> list[Request]:
        """Adds a group of `group_size` responses, and returns its requests to the engine.

        `policy_version` is that of the weights, `t_admitted` is in unix seconds. `begun` maps sample indexes to
        responses of an earlier process: a finished one is not requested again, of an unfinished one only the rest.
        `message_starts` are those of the prompt.
        """
        begun = begun or {}
        versions = [version for member in begun.values() for version, _ in member.response.version_spans]
        group = _Group(
            size=group_size,
            policy_version=min([policy_version, *versions]),
            t_admitted=min([t_admitted, *(member.request.t_admitted for member in begun.values())]),
        )
        for i in range(group_size):
            request = Request(
                group_id=group_id,
                sample_index=i,
                prompt_tokens=prompt_tokens,
                seed=derived_seed(self._run_seed, group_id, i),
                source=source,
                prompt=prompt,
                message_starts=message_starts,
                t_admitted=group.t_admitted,
            )
            if i not in begun:
                group.requests[i] = request
                continue
            earlier = replace(begun[i], request=request)
            if earlier.response.finish_reason != "unfinished":
                group.finished[i] = earlier
                continue
            group.begun[i] = earlier
            tokens = earlier.response.tokens
            group.requests[i] = replace(request, response_tokens=tokens, seed=derived_seed(request.seed, len(tokens)))
        self._groups[group_id] = group
        return list(group.requests.values())

    def add(self, trajectory: Trajectory) -> Trajectory:
        """Adds a finished trajectory of an admitted group. Returns it joined to the response that it continues."""
        group, i = self._groups[trajectory.request.group_id], trajectory.request.sample_index
        group.finished[i] = _joined(group.begun.get(i), trajectory)
        return group.finished[i]

    def take(self) -> list[Trajectory]:
        """Removes the complete groups. Returns their trajectories, in the order in which the groups were admitted."""
        taken: list[Trajectory] = []
        for group_id, group in list(self._groups.items()):
            if len(group.finished) == group.size:
                taken += [group.finished[i] for i in range(group.size)]
                del self._groups[group_id]
        return taken

    def interrupt(self, from_engine: Iterable[Trajectory]) -> list[Trajectory]:
        """Removes all groups. Returns their responses that have a token, finished or not.

        `from_engine` are the responses, finished or not, that the engine had in flight.
        """
        for trajectory in from_engine:
            group, i = self._groups[trajectory.request.group_id], trajectory.request.sample_index
            joined = _joined(group.begun.get(i), trajectory)
            members = group.begun if joined.response.finish_reason == "unfinished" else group.finished
            members[i] = joined
        responses = [member for group in self._groups.values() for member in group.responses().values()]
        self._groups.clear()
        return [response for response in responses if response.response.tokens]


def _joined(begun: Trajectory | None, rest: Trajectory) -> Trajectory:
    """Joins a response and its continuation; `begun` is None if nothing was sampled before."""
    if begun is None:
        return rest
    response = begun.response.followed_by(rest.response)
    return replace(rest, request=begun.request, response=response, t_started=begun.t_started)


def num_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Counts the response tokens of trajectories."""
    return sum(len(trajectory.response.tokens) for trajectory in trajectories)


def derived_seed(*numbers: int) -> int:
    """63 bits that depend on all the numbers and their order, so that a repeated request draws the same tokens."""
    digest = hashlib.sha256(":".join(str(number) for number in numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
