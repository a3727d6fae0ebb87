"""The interface of a reward: a prompt and a response in, a `Score` out. If it fails, that is an error, never a 0."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from configs.stored import DEFAULT_SOURCE
from millrace.errors import one_line
from millrace.types import Prompt

ScoreStatus = Literal["ok", "timeout", "error"]

_LARGEST = 3.4028234663852886e38
"""The largest float32: rewards are stored as such."""
_LONGEST_ERROR = 500
"""Characters. A library's error may quote the whole response."""

REWARD_COMPONENT = "reward_component/"
"""Prefix of the metrics of components; the component's name follows."""
MOST_COMPONENTS = 16
"""Such metrics per step: a reward may name its components freely, and each name is a separate series."""
_LONGEST_NAME, _LONGEST_STORED_NAME, _MOST_STORED = 80, 1000, 1000
"""Characters of a component's name in a metric and in a score, and components of a score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The result of scoring one response. Raises ValueError if its fields contradict each other."""

    reward: float | None
    """Finite as a float32, in the reward's own unit; None unless `status` is `ok`."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, in their own units."""
    status: ScoreStatus = "ok"
    """`ok`: there is a reward; `timeout`: the verifier took too long; `error`: it failed."""
    error: str | None = None
    """The reason for any other status than `ok`, in one line."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time of the verifier, without waiting in a queue; set by its caller."""
    t: float = field(default_factory=time.time, compare=False)
    """When the verifier ended, unix seconds; by default, when this object was made."""
    exchange: Mapping[str, Any] = field(default_factory=dict)
    """Requests to endpoints and their answers, plain JSON, by the name of the reward."""

    def __post_init__(self) -> None:
        is_ok = self.status == "ok"
        if is_ok != (self.error is None) or is_ok != (self.reward is not None):
            raise ValueError(f"status is {self.status}, reward is {self.reward} and error is {self.error!r}")
        if self.reward is not None and not abs(self.reward) <= _LARGEST:
            raise ValueError(f"reward is {self.reward:.6g}; expected a number between -3.4e38 and 3.4e38, as float32")
        if len(self.components) > _MOST_STORED:
            raise ValueError(f"there are {len(self.components):,} components; expected at most {_MOST_STORED:,}")
        for name in self.components:
            if not _is_name(name, _LONGEST_STORED_NAME):
                raise ValueError(
                    f"a component is named {name[:_LONGEST_NAME]!a}; expected 1 to 1,000 printable characters"
                )


class Reward(ABC):
    """A verifier of responses.

    Examples:
        >>> class Brief(Reward):
        ...     name, version = "brief", "1"
        ...
        ...     def score(self, prompt: Prompt, response: str) -> Score:
        ...         return Score(reward=float(response.strip() == prompt.answer and len(response) < 20))
        >>> question = Prompt(prompt_id="1", text="6*7=", answer="42", source="example")
        >>> safe_score(Brief(), question, " 42").reward
        1.0
    """

    name: str
    """Its name in configs."""
    version: str
    """Changes whenever the same response could get a different reward. Available once loaded."""
    isolated: bool = False
    """Whether it runs foreign code, or may never end: it then runs in a process that can be killed."""
    fresh: ClassVar[bool] = False
    """Whether each response gets a new process. Only for isolated rewards."""
    batch_size: ClassVar[int] = 1
    """Maximum number of responses per `score_batch`."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Keyword options that make an equal reward in another process, plain JSON; set by `factory.make_part`."""
    source: str = DEFAULT_SOURCE
    """The source that errors name, the first that it is the reward of, or a part of that; set by `Scorer`."""

    def load(self) -> None:  # noqa: B027 — most have nothing to load
        """Import and read what scoring needs. Called once, in the process that scores, or that forks those that do.

        Constructors are cheap and check their options. Raises InputError for what can't be used.
        """

    def warm_up(self) -> None:  # noqa: B027 — most are as fast at first as ever
        """Make the first response as fast as later ones. Called in every worker before its first response."""

    def check_answer(self, answer: str) -> None:  # noqa: B027 — most can use any answer
        """Raise ValueError if no response can be scored against this answer of a prompt.

        Called for every prompt before a run starts: takes microseconds and needs nothing that `load` loads.
        """

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> Score:
        """Score the decoded `response` to `prompt`. May raise anything: call `safe_score` instead."""

    def score_batch(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """Score up to `batch_size` responses, in order; exceptions become scores with status `error`."""
        return [safe_score(self, prompt, response) for prompt, response in pairs]


def safe_score(reward: Reward, prompt: Prompt, response: str) -> Score:
    """Score a response; any exception becomes a score with status `error` and no reward."""
    try:
        return reward.score(prompt, response)
    # sys.exit() and the timeouts of some libraries are BaseExceptions.
    except BaseException as error:  # noqa: BLE001 — a failed verification is data, stored with its reason
        return failed(f"{type(error).__name__}: {error}")


def failed(reason: str, status: ScoreStatus = "error") -> Score:
    """Make a score without a reward. `reason` is put on one line, shortened, and its control characters are escaped."""
    line = one_line(reason[: 2 * _LONGEST_ERROR])
    shown = line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 1]}…"
    return Score(reward=None, status=status, error=shown)


def component_means(texts: Iterable[str]) -> dict[str, float]:
    """Return the mean of each component over the responses that have it, by the metric's name.

    `texts` holds the components of each response as JSON. Of more than `MOST_COMPONENTS`, the first by name. Infinite
    and NaN values are left out, and so are names that are empty, not printable or longer than 80 characters.
    """
    values: dict[str, list[float]] = {}
    for components in map(json.loads, texts):
        for name, value in components.items():
            if math.isfinite(value) and _is_name(name, _LONGEST_NAME):
                values.setdefault(name, []).append(value)
    names = sorted(values)[:MOST_COMPONENTS]
    return {f"{REWARD_COMPONENT}{name}": sum(values[name]) / len(values[name]) for name in names}


def _is_name(name: str, longest: int) -> bool:
    """Half a surrogate pair, which UTF-8 can't encode, and control characters are not printable."""
    return 0 < len(name) <= longest and name.isprintable()
