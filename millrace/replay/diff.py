"""The place where two stored runs first differ, from config to data to loss: `millrace diff RUN_A RUN_B`.

    start_hashes.json ─► start model, tokenizer ─┐
    attempts/ of that step ─► config, provenance ├─► Diff: every kind of difference, and the first step of each
    ║ checkpoints ║ ─► checksums of the weights ─┘
    batch of step k    groups ─► prompts ─► versions ─► tokens ─► log-probs ─► rewards ─► advantages
                       each depends on those before it: the first one that differs is named
                       then the numbers: trainer_logprobs ─► loss ─► grad_norm

Both runs are read once, step by step, until both kinds of difference are found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.replay.source_run import TrainedStep, open_run_or_replay
from millrace.rollouts.scored_group import ScoredGroup
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
_IN_A_GROUP: Mapping[str, Callable[[ScoredGroup], Sequence[Any]]] = {
    "prompts": lambda group: group.prompt_tokens,
    "versions": lambda group: np.stack([group.min_policy_versions, group.max_policy_versions], 1).tolist(),
    "tokens": lambda group: group.response_tokens,
    "loss_mask": lambda group: group.loss_mask,
    "temperature": lambda group: [group.temperature],
    "kept_tokens": lambda group: group.kept_tokens,
    "kept_counts": lambda group: group.kept_counts,
    "rollout_logprobs": lambda group: group.rollout_logprobs,
    "rewards": lambda group: group.rewards,
}
"""Values of the members of a group, an array or a number each, in the order in which one depends on another."""


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first difference of its kind."""

    step: int
    """The policy version that the two runs made differently."""
    what: str
    """Name of the value."""
    where: str
    """The group, its member, the index of the value."""
    a: Any
    b: Any
    """The values, plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that differs between two runs."""

    name: str
    a: Any
    b: Any
    """The values, plain JSON; None if a run has none."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The differences between two runs."""

    run_a: str
    run_b: str
    """URLs of the runs."""
    config: list[Difference]
    """Dotted keys of the attempts at the first difference, or of the newest ones if there is none."""
    provenance: list[Difference]
    """Code, libraries, machine and version of the reward in the same attempts."""
    start: list[Difference]
    """SHA-256 of the start model's and the tokenizer's files, by file name; empty if a run did not store them."""
    steps: list[int]
    """First and last step that both have; empty if there is none."""
    batch: FirstDifference | None
    """First difference in the data they trained on."""
    numbers: FirstDifference | None
    """First difference in the resulting numbers."""
    checkpoints: list[int]
    """Versions for which both have a checkpoint with its files."""
    checkpoints_differing: list[int]
    """Versions among them whose weights differ, by CRC-32C."""
    sentence: str
    """The verdict, for people."""


def diff(store_a: Store, store_b: Store) -> Diff:
    """Compares the runs in two stores.

    Raises RunMissing, ReplayError if one stored too little, and StreamCorrupt or PartRemoved if rows or records can no
    longer be read.
    """
    run_a, run_b = open_run_or_replay(store_a), open_run_or_replay(store_b)
    steps = sorted(set(run_a.steps) & set(run_b.steps))
    batch: FirstDifference | None = None
    numbers: FirstDifference | None = None
    for step, a, b in zip(steps, run_a.read_trained(steps), run_b.read_trained(steps), strict=True):
        batch = batch or _first(step, _compare_batches(a, b))
        numbers = numbers or _first(step, _compare_numbers(a, b))
        if batch and numbers:
            break
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
    same = f"they are the same before step {difference.step} and " if difference.step > steps[0] else "they "
    consequence = _CONSEQUENCES.get(difference.what)
    value = f"{difference.what}: {consequence}" if consequence else f"the batch: {difference.what}"
    return f"{same}differ at step {difference.step} in {value} ({difference.where})"


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


_Where = tuple[str, str, Any, Any]
"""`what`, `where`, `a` and `b` of a FirstDifference."""


def _first(step: int, difference: _Where | None) -> FirstDifference | None:
    if difference is None:
        return None
    what, where, a, b = difference
    return FirstDifference(step=step, what=what, where=where, a=a, b=b)


def _compare_batches(a: TrainedStep, b: TrainedStep) -> _Where | None:
    ids_a, ids_b = ([group.group_id for group in step.groups] for step in (a, b))
    if set(ids_a) != set(ids_b):
        return "groups", "trained in one run alone", sorted(set(ids_a) - set(ids_b)), sorted(set(ids_b) - set(ids_a))
    if ids_a != ids_b:
        return "groups", "their order in the batch", ids_a, ids_b
    for what, values_of in _IN_A_GROUP.items():
        for group_a, group_b in zip(a.groups, b.groups, strict=True):
            members = [(group_a.group_id, member) for member in range(len(group_a.rewards))]
            if difference := _compare_members(what, values_of(group_a), values_of(group_b), members):
                return difference
    return _compare_members("advantages", [*a.advantages.values()], [*b.advantages.values()], [*a.advantages])


def _compare_numbers(a: TrainedStep, b: TrainedStep) -> _Where | None:
    logprobs_a, logprobs_b = a.trainer_logprobs, b.trainer_logprobs
    values = [*logprobs_a.values()], [*logprobs_b.values()]
    if difference := _compare_members("trainer_logprobs", *values, [*logprobs_a]):
        return difference
    for name in ("loss", "grad_norm"):
        # Metrics lost to damage are not a difference.
        if name in a.numbers and name in b.numbers and a.numbers[name] != b.numbers[name]:
            return name, "the whole batch", a.numbers[name], b.numbers[name]
    return None


def _compare_members(
    what: str, values_a: Sequence[Any], values_b: Sequence[Any], members: Sequence[tuple[int, int]]
) -> _Where | None:
    """The first difference between an array or a number per member; `members` are (group_id, member) in run A."""
    if len(values_a) != len(values_b):
        return what, f"trajectories of group {members[0][0]}", len(values_a), len(values_b)
    for (group_id, member), a, b in zip(members, values_a, values_b, strict=False):
        where = f"group {group_id}, member {member}"
        if not isinstance(a, np.ndarray):
            if a != b:
                return what, where, a, b
        elif not np.array_equal(a, b):
            shorter = min(len(a), len(b))
            unequal = np.flatnonzero(a[:shorter] != b[:shorter])
            if len(unequal) == 0:
                return what, where, f"{len(a)} tokens", f"{len(b)} tokens"
            first = int(unequal[0])
            return what, f"{where}, token {first}", a[first].item(), b[first].item()
    return None
