"""Ends a run whose reward fails for every response: it would generate and drop groups forever."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from millrace.errors import InputError

_SANDBOX = "Operation not permitted"
"""The error of a system call that the sandbox of a worker refuses."""


class FailingReward:
    """Counts the groups in a row without any score, among those that one scorer process gets.

    A step's worth of them, `groups_per_step`, is too many. Another process begins to count at 0, so a resumed run can
    use a reward that was corrected.
    """

    def __init__(self, reward: str, groups_per_step: int) -> None:
        self._reward = reward
        self._groups_per_step = groups_per_step
        self._groups = 0
        self._errors: list[str] = []

    def check(self, group_ids: Iterable[int], errors: Sequence[str | None]) -> None:
        """Count further groups: `errors` has why each response got no score, None if it got one.

        Raises InputError once there are too many without a score.
        """
        for _, rows in groupby(zip(group_ids, errors, strict=True), key=itemgetter(0)):
            failed = [error for _, error in rows]
            if None in failed:
                self._groups, self._errors = 0, []
                continue
            self._groups += 1
            self._errors += [error for error in failed if error is not None]
            if self._groups == self._groups_per_step:
                raise InputError(self._sentence())

    def _sentence(self) -> str:
        first = self._errors[0]
        hint = "; a reward's process has no network, starts no process and writes no file" if _SANDBOX in first else ""
        return (
            f"scoring.reward is {self._reward}, and none of {len(self._errors):,} responses got a score: the last "
            f"{self._groups:,} groups, a whole step's worth; the first error: {first}{hint}"
        )
