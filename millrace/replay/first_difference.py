"""The first step at which two stored runs differ: in what was trained on, or in the resulting numbers.

    run A ─► batch of step k ─┐    groups ─► prompts ─► versions ─► tokens ─► log-probs ─► rewards ─► advantages
                              ├─►  each depends on those before it: the first one that differs is named
    run B ─► batch of step k ─┘    then the numbers: trainer_logprobs ─► loss ─► grad_norm

Both runs are read once, step by step, until both kinds of difference are found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.replay.sources.source_run import SourceRun
from millrace.replay.trained_group import TrainedGroup, trained_groups
from millrace.runs.history import read_steps

_NUMBERS = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first difference of its kind."""

    step: int
    """The policy version that the two runs made differently."""
    what: str
    """The first thing that differs, in the order of the picture above."""
    where: str
    """The group, its member, the place of the value."""
    a: Any
    """The value in run A, plain JSON."""
    b: Any


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of one run."""

    groups: list[TrainedGroup]
    advantages: list[float]
    """[samples]."""
    trainer_logprobs: list[npt.NDArray[np.float32]]
    """[samples] of [R]."""
    numbers: dict[str, float]


def first_differences(
    run_a: SourceRun, run_b: SourceRun, steps: Sequence[int]
) -> tuple[FirstDifference | None, FirstDifference | None]:
    """Compares `steps`, which both runs have, bit for bit: the first difference in the batches, and in the numbers.

    Raises StreamCorrupt or PartRemoved if their rows can no longer be read.
    """
    batch: FirstDifference | None = None
    numbers: FirstDifference | None = None
    for step, a, b in zip(steps, _read(run_a, steps), _read(run_b, steps), strict=True):
        batch = batch or _batch(step, a, b)
        numbers = numbers or _numbers(step, a, b)
        if batch and numbers:
            break
    return batch, numbers


def _read(run: SourceRun, steps: Sequence[int]) -> Iterator[_Step]:
    """These steps of a run, in one pass over its parts."""
    batches = [run.batch(step).tolist() for step in steps]
    groups = trained_groups(run, [row for batch in batches for row in batch])
    numbers = {found.policy_version: found.values for found in read_steps(run.store)}
    for step, batch in zip(steps, batches, strict=True):
        yield _Step(
            groups=list(islice(groups, len(batch))),
            advantages=run.advantages(step),
            trainer_logprobs=run.trainer_logprobs(step),
            numbers=numbers.get(step, {}),
        )


def _batch(step: int, a: _Step, b: _Step) -> FirstDifference | None:
    ids_a, ids_b = ([found.group.group_id for found in one.groups] for one in (a, b))
    if set(ids_a) != set(ids_b):
        only_a, only_b = sorted(set(ids_a) - set(ids_b)), sorted(set(ids_b) - set(ids_a))
        return FirstDifference(step=step, what="groups", where="trained in one run alone", a=only_a, b=only_b)
    if ids_a != ids_b:
        return FirstDifference(step=step, what="groups", where="their order in the batch", a=ids_a, b=ids_b)
    for what, values_of in _IN_A_GROUP:
        for one, other in zip(a.groups, b.groups, strict=True):
            if differing := _first_difference(values_of(one), values_of(other)):
                member, place, value_a, value_b = differing
                where = f"group {one.group.group_id}, member {member}{place}"
                return FirstDifference(step=step, what=what, where=where, a=value_a, b=value_b)
    return _of_samples(step, "advantages", a.advantages, b.advantages, a.groups)


def _numbers(step: int, a: _Step, b: _Step) -> FirstDifference | None:
    if found := _of_samples(step, "trainer_logprobs", a.trainer_logprobs, b.trainer_logprobs, a.groups):
        return found
    for name in _NUMBERS:
        # Metrics lost to damage are not a difference.
        if name in a.numbers and name in b.numbers and a.numbers[name] != b.numbers[name]:
            return FirstDifference(step=step, what=name, where="the whole batch", a=a.numbers[name], b=b.numbers[name])
    return None


def _of_samples(
    step: int, what: str, values_a: Sequence[Any], values_b: Sequence[Any], groups_a: Sequence[TrainedGroup]
) -> FirstDifference | None:
    """The first difference in a value per trained trajectory, named by its group in run A."""
    if len(values_a) != len(values_b):
        return FirstDifference(step=step, what=what, where="trajectories trained", a=len(values_a), b=len(values_b))
    if (differing := _first_difference(values_a, values_b)) is None:
        return None
    sample, place, value_a, value_b = differing
    owners = [(found.group.group_id, member) for found in groups_a for member in found.trained]
    group_id, member = owners[sample]
    where = f"group {group_id}, member {member}{place}"
    return FirstDifference(step=step, what=what, where=where, a=value_a, b=value_b)


def _versions(found: TrainedGroup) -> list[list[int]]:
    """[G] of oldest and newest."""
    oldest, newest = found.group.min_policy_versions.tolist(), found.group.max_policy_versions.tolist()
    return [list(pair) for pair in zip(oldest, newest, strict=True)]


_IN_A_GROUP: Sequence[tuple[str, Callable[[TrainedGroup], Sequence[Any]]]] = (
    ("prompts", lambda found: found.group.prompt_tokens),
    ("versions", _versions),
    ("tokens", lambda found: found.group.response_tokens),
    ("loss_mask", lambda found: found.group.loss_mask),
    ("temperature", lambda found: [found.group.temperature]),
    ("kept_tokens", lambda found: found.group.kept_tokens),
    ("kept_counts", lambda found: found.group.kept_counts),
    ("rollout_logprobs", lambda found: found.group.rollout_logprobs),
    ("rewards", lambda found: found.rewards),
)
"""Values of the members of a group, an array or a number each, in the order in which one depends on another."""


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, str, Any, Any] | None:
    """(member, place in it, value, value) of the first difference; None if all members are equal bit for bit."""
    if len(a) != len(b):
        return min(len(a), len(b)), "", f"{len(a)} members", f"{len(b)} members"
    for member, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        if not isinstance(ours, np.ndarray):
            if ours != theirs:
                return member, "", ours, theirs
        elif not np.array_equal(ours, theirs):
            return member, *_in_array(ours, theirs)
    return None


def _in_array(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> tuple[str, Any, Any]:
    both = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:both] != theirs[:both])
    if len(unequal) == 0:
        return "", f"{len(ours)} tokens", f"{len(theirs)} tokens"
    first = int(unequal[0])
    return f", token {first}", ours[first].item(), theirs[first].item()
