"""Which reward a config's name stands for."""

from collections.abc import Callable

from millrace.errors import InputError
from millrace.rewards.base import Reward
from millrace.rewards.exact_match import ExactMatch


def make_reward(name: str, **options: object) -> Reward:
    """Make the reward that configs call `name` with its own keyword options.

    Raises InputError for a name or an option value that can't be used, TypeError for an option that the reward lacks.
    """
    known: dict[str, Callable[..., Reward]] = {ExactMatch.name: ExactMatch}
    if name not in known:
        raise InputError(f'scoring.reward is "{name}"; expected one of {", ".join(sorted(known))}')
    return known[name](**options)
