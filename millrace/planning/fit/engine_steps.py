"""The steps of an engine, recovered from when its responses began and ended.

An engine samples a token of every request in flight in each of its steps. So a response of n tokens that began behind
step k ends with step k + n, and that step ended when the response did:

    step      0     1     2     3     4     5
    a, n = 5  ├─────┼─────┼─────┼─────┼─────┤ ends: step 5
    b, n = 2  ├─────┼─────┤ ends: step 2
    c, n = 3              ├─────┼─────┼─────┤ began when b ended, so behind step 2

Requests may also begin while nothing ends. Of the steps in question, theirs is the one that agrees best with the order
in which all responses ended.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.planning.fit.measured import Rollouts

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_LATEST = 1 << 62
_AROUND = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """Some steps in a row each, from one in which responses ended to the next one in which some did; [N] each."""

    begin: _Floats
    """Unix seconds."""
    seconds: _Floats
    steps: _Floats
    tokens: _Floats
    """Sampled in these steps."""
    context: _Floats
    """Tokens in the key-value cache, summed over the steps."""
    padded: _Floats
    """The same, if all requests were as long as the longest in flight."""
    passes: _Floats
    """Times that new requests came in."""
    prefilled: _Floats
    """Their prompt tokens, each group's once."""
    ended: _Floats
    """Responses that ended with the step before the first of these."""

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> "Stretches":
        return Stretches(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def find_stretches(rollouts: Rollouts) -> Stretches:
    """Of one generator. Times in which its engine was empty are left out."""
    behind, ends = _steps_of(rollouts)
    if len(ends) < 2:
        return Stretches(**{name: np.zeros(0) for name in Stretches.__dataclass_fields__})
    steps = np.array(sorted(ends), dtype=np.int64)
    t = np.array([ends[step] for step in steps.tolist()])
    edges, first = steps - steps[0], behind - steps[0]
    last = first + rollouts.response_tokens
    size = int(edges[-1]) + 2
    running, context = _per_step(first, last, rollouts.prompt_tokens, size)
    padded = running * _longest(first, last, rollouts.prompt_tokens, size)
    passes, prefilled = _entering(rollouts, first, edges)
    ended = np.histogram(last, bins=[*edges, edges[-1] + 1])[0][:-1].astype(np.float64)
    begin = t[:-1].copy()
    # An engine that was empty did nothing until requests came.
    began = {int(step): float(rollouts.started[first == step].min()) for step in _empty_after(first, last, edges)}
    for k, edge in enumerate(edges[:-1].tolist()):
        if edge in began:
            begin[k], ended[k] = began[edge], 0.0
    found = Stretches(
        begin=begin,
        seconds=t[1:] - begin,
        steps=np.diff(edges).astype(np.float64),
        tokens=_between(running, edges),
        context=_between(context, edges),
        padded=_between(padded, edges),
        passes=passes,
        prefilled=prefilled,
        ended=ended,
    )
    # Steps in which nothing ran, and times that contradict each other, are errors of a few in thousands.
    return found[(found.tokens >= found.steps) & (found.seconds > 0)]


def _steps_of(rollouts: Rollouts) -> tuple[_Ints, dict[int, float]]:
    """([N] the step behind which each response began, the end of each step in which one ended)."""
    first = np.zeros(len(rollouts), dtype=np.int64)
    # (time, step) of the ends known so far, ascending.
    known: list[tuple[float, int]] = []
    ends: dict[int, float] = {}
    order = np.argsort(rollouts.started, kind="stable")
    if not len(order):
        return first, ends
    times, starts = np.unique(rollouts.started[order], return_index=True)
    for t, some in zip(times, np.split(order, starts[1:]), strict=True):
        tokens, finished = rollouts.response_tokens[some], rollouts.finished[some]
        own = [(float(finished[tokens == length].max()), int(length)) for length in np.unique(tokens)]
        step = _step_at(float(t), known, own)
        first[some] = step
        for t_end, length in own:
            ends[step + length] = max(t_end, ends.get(step + length, t_end))
            insort(known, (t_end, step + length))
    return first, ends


def _step_at(t: float, known: list[tuple[float, int]], own: list[tuple[float, int]]) -> int:
    """The step that was the last one at that time, at which requests began that ended as `own` says: (time, tokens)."""
    place = bisect_right(known, (t, _LATEST))
    if place == 0:
        return 0
    t_before, before = known[place - 1]
    if place == len(known):
        return max(step for _, step in known[-_AROUND:])
    t_next, following = known[place]
    # By the time alone.
    guess = before + int((t - t_before) / max(1e-9, t_next - t_before) * (following - before))
    # A request begins between two steps, and mostly right behind one in which others ended.
    near = range(max(before, guess - _AROUND), min(max(before, following - 1), guess + _AROUND) + 1)
    return min(near, key=lambda step: (_contradictions(step, known, own), step - before))


def _contradictions(step: int, known: list[tuple[float, int]], own: list[tuple[float, int]]) -> int:
    """How many of these ends would be of an earlier step than one before them, or of a later one than one after."""
    count = 0
    for t, tokens in own:
        place = bisect_right(known, (t, _LATEST))
        count += place > 0 and known[place - 1][1] > step + tokens
        count += place < len(known) and known[place][1] < step + tokens
    return count


def _per_step(first: _Ints, last: _Ints, prompts: _Ints, size: int) -> tuple[_Floats, _Floats]:
    """([K] responses that got a token in each step, [K] tokens that these attended to)."""
    lows, highs = np.clip(first + 1, 0, size), np.clip(last + 1, 0, size)
    count, base = np.zeros(size + 1), np.zeros(size + 1)
    np.add.at(count, lows, 1)
    np.add.at(count, highs, -1)
    np.add.at(base, lows, prompts - first)
    np.add.at(base, highs, -(prompts - first))
    running, offset = np.cumsum(count)[:size], np.cumsum(base)[:size]
    return running, offset + running * np.arange(size)


def _longest(first: _Ints, last: _Ints, prompts: _Ints, size: int) -> _Floats:
    """[K] most tokens that any response attended to in each step; 0 where none ran."""
    origin = np.full(size, size, dtype=np.int64)
    for begin, end, low in zip((first + 1).tolist(), (last + 1).tolist(), (first - prompts).tolist(), strict=True):
        if 0 <= begin < size:
            np.minimum(origin[begin:end], low, out=origin[begin:end])
    found: _Floats = np.where(origin < size, np.arange(size) - origin, 0).astype(np.float64)
    return found


def _entering(rollouts: Rollouts, first: _Ints, edges: _Ints) -> tuple[_Floats, _Floats]:
    """By stretch: how many times requests came in, and their prompt tokens, each group's once."""
    _, where = np.unique(rollouts.group, return_index=True)
    inside = where[(first[where] >= edges[0]) & (first[where] < edges[-1])]
    prefilled = np.histogram(first[inside], bins=edges, weights=rollouts.prompt_tokens[inside].astype(np.float64))[0]
    begun = np.unique(first[(first >= edges[0]) & (first < edges[-1])])
    return np.histogram(begun, bins=edges)[0].astype(np.float64), prefilled


def _between(per_step: _Floats, edges: _Ints) -> _Floats:
    """Sums over the steps after each edge, up to the next one."""
    total = np.concatenate([[0.0], np.cumsum(per_step)])
    found: _Floats = np.diff(total[edges + 1])
    return found


def _empty_after(first: _Ints, last: _Ints, edges: _Ints) -> _Ints:
    """Those edges, the last one aside, at which all that ran ended; others began behind them."""
    size = int(edges[-1]) + 2
    change = np.zeros(size + 1)
    # A response is on its way over an edge behind which it began, and before which it does not end.
    np.add.at(change, np.clip(first + 1, 0, size), 1)
    np.add.at(change, np.clip(last, 0, size), -1)
    continuing = np.cumsum(change)
    empty = edges[:-1][continuing[edges[:-1]] == 0]
    return np.intersect1d(empty, first)
