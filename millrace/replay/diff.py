"""Where two stored runs first differ, from config to data to loss: `millrace diff RUN_A RUN_B`.

    start_hashes.json ─► start model, tokenizer ─┐
    attempts/ of that step ─► config, provenance ├─► Diff: every kind of difference, and the first step of each
    ║ checkpoints ║ ─► checksums of the weights ─┘
    batch of step k    groups ─► prompts ─► versions ─► tokens ─► log-probs ─► rewards ─► advantages
                       each depends on those before it: the first one that differs is named
                       then the numbers: trainer_logprobs ─► loss ─► grad_norm

Both runs are read once, step by step, until both kinds of difference are found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.replay.source_run import SourceRun
from millrace.replay.trained_group import TrainedGroup, trained_groups
from millrace.runs.history import read_steps
from millrace.runs.provenance import differences, read_start_hashes
from millrace.runs.record import attempt_of_step, latest_attempt
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.schema import SCORE
from storage.stores.base import Store
from storage.streams.log import backwards
from storage.streams.stream import read_part, stream_head

_CONSEQUENCES = {
    "trainer_logprobs": "the same batch, but the weights before the step differ",
    "loss": "the same batch and the same log-probabilities, but the loss differs",
    "grad_norm": "the same batch and the same loss, but the gradient differs",
}


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
class Difference:
    """One value that differs between two runs."""

    name: str
    """Dotted key of a config, or what was compared."""
    a: Any
    """In run A, plain JSON; None if it has none."""
    b: Any


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What two runs have in common, and where they differ."""

    run_a: str
    """Its URL."""
    run_b: str
    config: list[Difference]
    """By dotted key: of the attempts at the first difference, or of the newest ones if there is none."""
    provenance: list[Difference]
    """Of the same attempts: code, libraries, machine, and the version of the reward."""
    start: list[Difference]
    """SHA-256 of the start model's and the tokenizer's files, by file name; empty if a run did not store them."""
    steps: list[int]
    """First and last step that both have; empty if there is none."""
    batch: FirstDifference | None
    """First difference in what they trained on."""
    numbers: FirstDifference | None
    """First difference in the resulting numbers."""
    checkpoints: list[int]
    """Versions for which both have a checkpoint with its files."""
    checkpoints_differing: list[int]
    """Those of them whose weights differ, by CRC-32C."""
    sentence: str
    """The verdict, for people."""


def diff(store_a: Store, store_b: Store) -> Diff:
    """Compares the runs in two stores.

    Raises RunMissing, ReplayError if one stored too little, and StreamCorrupt or PartRemoved if rows or records can no
    longer be read.
    """
    run_a, run_b = SourceRun(store_a), SourceRun(store_b)
    steps = sorted(set(run_a.steps) & set(run_b.steps))
    batch, numbers = _first_differences(run_a, run_b, steps)
    # In the same step, the batch comes before the numbers.
    first = min((difference for difference in (batch, numbers) if difference), key=lambda d: d.step, default=None)
    stores = (store_a, store_b)
    attempts = [latest_attempt(s) if first is None else attempt_of_step(s, first.step) for s in stores]
    made_by = differences(attempts[0].provenance, attempts[1].provenance)
    rewards = [_verifier_version(s, attempt.config) for s, attempt in zip(stores, attempts, strict=True)]
    if None not in rewards and rewards[0] != rewards[1]:
        made_by["reward version"] = (rewards[0], rewards[1])
    start_a, start_b = read_start_hashes(store_a), read_start_hashes(store_b)
    both = sorted(run_a.checkpoints.keys() & run_b.checkpoints.keys())
    differing = [
        step for step in both if weights_checksum(run_a.checkpoints[step]) != weights_checksum(run_b.checkpoints[step])
    ]
    return Diff(
        run_a=run_a.url,
        run_b=run_b.url,
        config=_unlike(_flat(attempts[0].config), _flat(attempts[1].config)),
        provenance=[Difference(name=name, a=a, b=b) for name, (a, b) in made_by.items()],
        start=[] if start_a is None or start_b is None else _unlike(start_a, start_b),
        steps=[steps[0], steps[-1]] if steps else [],
        batch=batch,
        numbers=numbers,
        checkpoints=both,
        checkpoints_differing=differing,
        sentence=_sentence(steps, first, f"{len(both) - len(differing)} of {len(both)} checkpoints"),
    )


def _sentence(steps: list[int], difference: FirstDifference | None, same_weights: str) -> str:
    if not steps:
        return "they have no step in common"
    if difference is None:
        return f"steps {steps[0]} to {steps[-1]} are the same, bit for bit: batches and numbers; so are {same_weights}"
    before = f"they are the same before step {difference.step} and " if difference.step > steps[0] else "they "
    if difference.what in _CONSEQUENCES:
        what = f"{difference.what}: {_CONSEQUENCES[difference.what]}"
    else:
        what = f"what was trained on: {difference.what}"
    return f"{before}differ at step {difference.step} in {what} ({difference.where})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_section = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    names = sorted(a.keys() | b.keys())
    return [Difference(name=n, a=a.get(n), b=b.get(n)) for n in names if a.get(n) != b.get(n)]


def _verifier_version(store: Store, config: Mapping[str, Any]) -> str | None:
    """Version of the reward that gave the newest scores; None if there are none."""
    scoring = config["scoring"]
    path = layout.scores(scoring["reward"], 0, 0, scoring["replicas"])
    for record in backwards(store, path, stream_head(store, path)):
        if record.kind == "data":
            versions = read_part(store, path, SCORE, record, columns=["verifier_version"])["verifier_version"]
            version: str = versions[-1].as_py()
            return version
    return None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of one run."""

    groups: list[TrainedGroup]
    advantages: list[float]
    """[samples]."""
    trainer_logprobs: list[npt.NDArray[np.float32]]
    """[samples] of [R]."""
    numbers: dict[str, float]


def _first_differences(
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
    """Reads these steps of a run in one pass over its parts."""
    batches = [run.batch(step).tolist() for step in steps]
    groups = trained_groups(run, [row for batch in batches for row in batch])
    numbers = {step.policy_version: step.values for step in read_steps(run.store)}
    for step, batch in zip(steps, batches, strict=True):
        yield _Step(
            groups=list(islice(groups, len(batch))),
            advantages=run.advantages(step),
            trainer_logprobs=run.trainer_logprobs(step),
            numbers=numbers.get(step, {}),
        )


def _batch(step: int, a: _Step, b: _Step) -> FirstDifference | None:
    ids_a, ids_b = ([trained.group.group_id for trained in step_of.groups] for step_of in (a, b))
    if set(ids_a) != set(ids_b):
        only_a, only_b = sorted(set(ids_a) - set(ids_b)), sorted(set(ids_b) - set(ids_a))
        return FirstDifference(step=step, what="groups", where="trained in one run alone", a=only_a, b=only_b)
    if ids_a != ids_b:
        return FirstDifference(step=step, what="groups", where="their order in the batch", a=ids_a, b=ids_b)
    for what, values_of in _IN_A_GROUP:
        for group_a, group_b in zip(a.groups, b.groups, strict=True):
            if differing := _first_difference(values_of(group_a), values_of(group_b)):
                member, place, value_a, value_b = differing
                where = f"group {group_a.group.group_id}, member {member}{place}"
                return FirstDifference(step=step, what=what, where=where, a=value_a, b=value_b)
    return _of_samples(step, "advantages", a.advantages, b.advantages, a.groups)


def _numbers(step: int, a: _Step, b: _Step) -> FirstDifference | None:
    if differing := _of_samples(step, "trainer_logprobs", a.trainer_logprobs, b.trainer_logprobs, a.groups):
        return differing
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
    owners = [(trained.group.group_id, member) for trained in groups_a for member in trained.trained]
    group_id, member = owners[sample]
    where = f"group {group_id}, member {member}{place}"
    return FirstDifference(step=step, what=what, where=where, a=value_a, b=value_b)


_IN_A_GROUP: Sequence[tuple[str, Callable[[TrainedGroup], Sequence[Any]]]] = (
    ("prompts", lambda trained: trained.group.prompt_tokens),
    (
        "versions",
        lambda trained: np.stack([trained.group.min_policy_versions, trained.group.max_policy_versions], 1).tolist(),
    ),
    ("tokens", lambda trained: trained.group.response_tokens),
    ("loss_mask", lambda trained: trained.group.loss_mask),
    ("temperature", lambda trained: [trained.group.temperature]),
    ("kept_tokens", lambda trained: trained.group.kept_tokens),
    ("kept_counts", lambda trained: trained.group.kept_counts),
    ("rollout_logprobs", lambda trained: trained.group.rollout_logprobs),
    ("rewards", lambda trained: trained.rewards),
)
"""Values of the members of a group, an array or a number each, in the order in which one depends on another."""


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, str, Any, Any] | None:
    """(member, place in it, value, value) of the first difference; None if all members are equal bit for bit."""
    if len(a) != len(b):
        return min(len(a), len(b)), "", f"{len(a)} members", f"{len(b)} members"
    for member, (value_a, value_b) in enumerate(zip(a, b, strict=True)):
        if not isinstance(value_a, np.ndarray):
            if value_a != value_b:
                return member, "", value_a, value_b
        elif not np.array_equal(value_a, value_b):
            return member, *_in_arrays(value_a, value_b)
    return None


def _in_arrays(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[str, Any, Any]:
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter])
    if len(unequal) == 0:
        return "", f"{len(a)} tokens", f"{len(b)} tokens"
    first = int(unequal[0])
    return f", token {first}", a[first].item(), b[first].item()
