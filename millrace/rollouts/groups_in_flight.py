"""The groups that a generator is working on: admitted in order, finished in any order, handed on in order.

    admit 7, 8, 9 ─► engine ─► 9 done, 7 done ─► take: 7        8 is unfinished, and 9 waits for it
                               8 done         ─► take: 8, 9

The order lets the stream itself say which group comes next after a crash. It also keeps the trainer from getting short
responses first, as it would if groups were handed on as they finish (docs/decisions/0018).
"""

import hashlib

from millrace.types import Prompt, Request, Trajectory


class GroupsInFlight:
    """Groups of `group_size` trajectories each. `run_seed` is the run's seed."""

    def __init__(self, group_size: int, run_seed: int) -> None:
        self._group_size = group_size
        self._run_seed = run_seed
        # Group number → its finished trajectories by place in the group.
        self._groups: dict[int, dict[int, Trajectory]] = {}

    def __len__(self) -> int:
        """Groups admitted and not taken yet."""
        return len(self._groups)

    def admit(self, group_id: int, prompt: Prompt, prompt_tokens: tuple[int, ...], t_admitted: float) -> list[Request]:
        """The group's requests for the engine; `t_admitted` in unix seconds. Admit groups in ascending order."""
        self._groups[group_id] = {}
        return [
            Request(
                group_id=group_id,
                sample_index=i,
                prompt_tokens=prompt_tokens,
                seed=trajectory_seed(self._run_seed, group_id, i),
                prompt=prompt,
                t_admitted=t_admitted,
            )
            for i in range(self._group_size)
        ]

    def add(self, trajectory: Trajectory) -> None:
        """Adds one finished trajectory of an admitted group."""
        self._groups[trajectory.request.group_id][trajectory.request.sample_index] = trajectory

    def take(self) -> list[Trajectory]:
        """The trajectories of all finished groups before the first unfinished one, in order."""
        taken: list[Trajectory] = []
        for group_id, finished in list(self._groups.items()):
            if len(finished) < self._group_size:
                break
            taken += [finished[i] for i in range(self._group_size)]
            del self._groups[group_id]
        return taken

    def clear(self) -> None:
        """Forgets all groups."""
        self._groups.clear()


def trajectory_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """63 bits from the run's seed and the trajectory's place, so that a repeated request draws the same tokens."""
    digest = hashlib.sha256(f"{run_seed}:{group_id}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
