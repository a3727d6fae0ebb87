"""The groups a generator is at: admitted in order, finished in any order, handed on in order.

    admit 7, 8, 9 ─► engine ─► 9 done, 7 done ─► take: 7        8 is still at it, and 9 waits for it
                               8 done         ─► take: 8, 9

In order, because then the stream itself says which group comes next after any crash, and because a trainer that takes
what is finished first is fed short responses first (docs/decisions/0018).
"""

import hashlib
from dataclasses import dataclass, field

from millrace.trajectories import Rollout
from millrace.types import Prompt, Request, Sampled


@dataclass(kw_only=True)
class _Group:
    prompt: Prompt
    t_admitted: float
    rollouts: dict[int, Rollout] = field(default_factory=dict)


class GroupsInFlight:
    """Groups of `group_size` rollouts each; `run_seed` is the run's."""

    def __init__(self, group_size: int, run_seed: int) -> None:
        self._group_size = group_size
        self._run_seed = run_seed
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        """Groups admitted and not taken yet."""
        return len(self._groups)

    def admit(self, group_id: int, prompt: Prompt, prompt_tokens: tuple[int, ...], t_admitted: float) -> list[Request]:
        """What the engine is asked for this group; `t_admitted` in unix seconds. Groups come in ascending order."""
        self._groups[group_id] = _Group(prompt=prompt, t_admitted=t_admitted)
        return [
            Request(
                group_id=group_id,
                sample_index=i,
                prompt_tokens=prompt_tokens,
                seed=trajectory_seed(self._run_seed, group_id, i),
                prompt=prompt,
            )
            for i in range(self._group_size)
        ]

    def add(self, sampled: Sampled) -> None:
        """Notes one finished trajectory of a group admitted before."""
        request = sampled.request
        group = self._groups[request.group_id]
        group.rollouts[request.sample_index] = Rollout(
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt=group.prompt,
            prompt_tokens=request.prompt_tokens,
            response=sampled.response,
            seed=request.seed,
            t_admitted=group.t_admitted,
            t_started=sampled.t_started,
            t_finished=sampled.t_finished,
        )

    def take(self) -> list[Rollout]:
        """The rollouts of all groups that are whole and have none before them that is not, in order."""
        taken: list[Rollout] = []
        for group_id in list(self._groups):
            group = self._groups[group_id]
            if len(group.rollouts) < self._group_size:
                break
            taken += [group.rollouts[i] for i in range(self._group_size)]
            del self._groups[group_id]
        return taken

    def clear(self) -> None:
        """Forgets them all."""
        self._groups.clear()


def trajectory_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """63 bits that follow from the run's seed and the trajectory's place: asked once more, it draws the same."""
    digest = hashlib.sha256(f"{run_seed}:{group_id}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
