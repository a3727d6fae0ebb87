"""A group on its way: from its admission to the trainer."""

from bisect import bisect_left
from collections.abc import Sequence

TOGETHER = 1e-6
"""Of a token. Token clocks are sums of rounded numbers: what is closer together than this is at once."""


class History:
    """Which version a generator had at which time of its token clock."""

    def __init__(self) -> None:
        self._clocks: list[float] = []
        self._versions: list[int] = []

    def add(self, clock: float, policy_version: int) -> None:
        """From `clock` on, the generator samples with this version, which is newer than those before."""
        self._clocks.append(clock)
        self._versions.append(policy_version)

    def version_of_first_token(self, start: float) -> int:
        """The version that samples the first token of a request that starts then."""
        return self._versions[bisect_left(self._clocks, start + 1 - TOGETHER) - 1]

    def tokens_before(self, policy_version: int, start: float, length: int) -> int:
        """How many of the first `length` tokens of a request that starts then are of versions before this one."""
        place = bisect_left(self._versions, policy_version)
        if place == len(self._versions):
            return length
        return min(length, max(0, int(self._clocks[place] - start + TOGETHER)))


class Group:
    """`lengths` and `prompt_tokens` are those of `Lengths.of_group`."""

    __slots__ = (
        *("number", "generator", "admitted_version", "min_version", "max_version", "history"),
        *("prompt_tokens", "lengths", "starts", "unfinished", "t_ready"),
    )

    def __init__(
        self,
        number: int,
        generator: int,
        admitted_version: int,
        history: History,
        prompt_tokens: int,
        lengths: Sequence[int],
    ) -> None:
        self.number = number
        self.generator = generator
        self.admitted_version = admitted_version
        # The oldest and the newest version that sampled a token of it, once it is whole.
        self.min_version = self.max_version = admitted_version
        self.history = history
        self.prompt_tokens = prompt_tokens
        self.lengths = lengths
        # By the generator's token clock, of those members that have started.
        self.starts: list[float] = []
        self.unfinished = len(lengths)
        self.t_ready = 0.0

    def end(self, policy_version: int) -> None:
        """It is whole; `policy_version` is that of the generator."""
        self.min_version = self.history.version_of_first_token(self.starts[0])
        self.max_version = policy_version


def count_up(counts: dict[int, int], policy_version: int) -> None:
    """One more group of this version."""
    counts[policy_version] = counts.get(policy_version, 0) + 1


def count_down(counts: dict[int, int], policy_version: int) -> None:
    """One group less; a version without any is not in `counts`."""
    counts[policy_version] -= 1
    if not counts[policy_version]:
        del counts[policy_version]
