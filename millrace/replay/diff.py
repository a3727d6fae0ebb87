"""The place where two stored runs first differ, from config to data to loss: `millrace diff RUN_A RUN_B`.

    start_hashes.json ─► start model, tokenizer ─┐
    attempts/ of that step ─► config, provenance ├─► every kind of difference, and the first step of each
    ║ checkpoints ║ ─► checksums of the weights ─┘
    batch of step k    groups ─► prompts ─► versions ─► tokens ─► log-probs ─► rewards ─► advantages
                       each depends on those before it: the first one that differs is named
                       then the numbers: trainer_logprobs ─► loss ─► grad_norm

Both runs are read once, step by step, until both kinds of difference are found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from millrace.replay.source_run import SourceRun, TrainedStep, open_run_or_replay
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.provenance import differences, read_start_hashes
from millrace.runs.record import attempt_of_step, latest_attempt
from millrace.training.checkpoints.names import weights_checksum
from storage.stores.base import Store

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


Json = dict[str, Any]


def diff(store_a: Store, store_b: Store) -> Json:
    """Compares the runs in two stores; returns plain JSON.

    `config`, `provenance` and `start` (SHA-256 of the start model's files) list the values that differ, each with its
    `name` and both values, `a` and `b`. The configs are those of the attempts at the first difference, or else the
    newest. `steps`: the first and the last step that both have. `batch` and `numbers`: the first difference in the data
    and in the results, with its `step`, `what`, `where`, `a` and `b`, or None. `checkpoints`: the versions that both
    have, `checkpoints_differing` those with other weights. `sentence`: the verdict, for people.

    Raises RunMissing, ReplayError if one stored too little, and StreamCorrupt or PartRemoved if rows or records can no
    longer be read.
    """
    run_a, run_b = open_run_or_replay(store_a), open_run_or_replay(store_b)
    steps = sorted(set(run_a.steps) & set(run_b.steps))
    batch = numbers = None
    for step, a, b in zip(steps, run_a.read_trained(steps), run_b.read_trained(steps), strict=True):
        batch = batch or _first_difference(step, _batch_values(a), _batch_values(b))
        numbers = numbers or _first_difference(step, _number_values(a, b), _number_values(b, a))
        if batch and numbers:
            break
    # In the same step, the batch comes before the numbers.
    first = min((difference for difference in (batch, numbers) if difference), key=itemgetter("step"), default=None)
    stores = (store_a, store_b)
    attempts = [latest_attempt(s) if first is None else attempt_of_step(s, first["step"]) for s in stores]
    made_by = differences(attempts[0].provenance, attempts[1].provenance)
    of_a, of_b = (_verifier_versions(run) for run in (run_a, run_b))
    unequal = [source for source in sorted(of_a.keys() & of_b.keys()) if of_a[source] != of_b[source]]
    if unequal:
        made_by["reward version"] = (", ".join(of_a[s] for s in unequal), ", ".join(of_b[s] for s in unequal))
    start_a, start_b = read_start_hashes(store_a), read_start_hashes(store_b)
    both = sorted(run_a.checkpoints.keys() & run_b.checkpoints.keys())
    differing = [
        step for step in both if weights_checksum(run_a.checkpoints[step]) != weights_checksum(run_b.checkpoints[step])
    ]
    return {
        "run_a": run_a.url,
        "run_b": run_b.url,
        "config": _unlike(_flat(attempts[0].config), _flat(attempts[1].config)),
        "provenance": [{"name": name, "a": a, "b": b} for name, (a, b) in made_by.items()],
        "start": [] if start_a is None or start_b is None else _unlike(start_a, start_b),
        "steps": [steps[0], steps[-1]] if steps else [],
        "batch": batch,
        "numbers": numbers,
        "checkpoints": both,
        "checkpoints_differing": differing,
        "sentence": _sentence(steps, first, f"{len(both) - len(differing)} of {len(both)} checkpoints"),
    }


def _sentence(steps: list[int], difference: Json | None, same_weights: str) -> str:
    if not steps:
        return "they have no step in common"
    if difference is None:
        return f"steps {steps[0]} to {steps[-1]} are the same, bit for bit: batches and numbers; so are {same_weights}"
    step, what = difference["step"], difference["what"]
    same = f"they are the same before step {step} and " if step > steps[0] else "they "
    value = f"{what}: {_CONSEQUENCES[what]}" if what in _CONSEQUENCES else f"the batch: {what}"
    return f"{same}differ at step {step} in {value} ({difference['where']})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_section = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    names = sorted(a.keys() | b.keys())
    return [{"name": name, "a": a.get(name), "b": b.get(name)} for name in names if a.get(name) != b.get(name)]


def _verifier_versions(run: SourceRun) -> dict[str, str]:
    """Versions of the rewards that scored the first generator's last part, by source; none if it has no scores."""
    last = len(run.parts.records[0]) - 1
    scores = run.parts.scores(0, last, ["verifier_version"]) if last >= 0 else None
    if scores is None:
        return {}
    sources = run.parts.trajectories(0, last, ["source"]).table["source"]
    return dict(zip(sources.to_pylist(), scores["verifier_version"].to_pylist(), strict=True))


_Value = tuple[str, str, Any]
"""What, where, and a plain value or an array."""


def _batch_values(step: TrainedStep) -> Iterator[_Value]:
    """The data of a step, each value before those that depend on it."""
    yield "groups", "the batch in order", [group.group_id for group in step.groups]
    for what, values_of in _IN_A_GROUP.items():
        for group in step.groups:
            for member, value in enumerate(values_of(group)):
                yield what, _name((group.group_id, member)), value
    yield from (("advantages", _name(member), advantage) for member, advantage in step.advantages.items())


def _number_values(step: TrainedStep, other: TrainedStep) -> Iterator[_Value]:
    yield from (("trainer_logprobs", _name(member), values) for member, values in step.trainer_logprobs.items())
    # Metrics lost to damage are not a difference.
    shared = step.numbers.keys() & other.numbers.keys()
    yield from ((name, "the whole batch", step.numbers[name]) for name in ("loss", "grad_norm") if name in shared)


def _name(member: tuple[int, int]) -> str:
    return f"group {member[0]}, member {member[1]}"


def _first_difference(step: int, values_a: Iterator[_Value], values_b: Iterator[_Value]) -> Json | None:
    end = ("members", "the end of the batch", None)
    for (what, where, a), (what_b, where_b, b) in zip_longest(values_a, values_b, fillvalue=end):
        if (what, where) != (what_b, where_b):
            return {"step": step, "what": what, "where": "trained members", "a": where, "b": where_b}
        if (difference := _unequal(a, b)) is not None:
            place, value_a, value_b = difference
            return {"step": step, "what": what, "where": where + place, "a": value_a, "b": value_b}
    return None


def _unequal(a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """The place of the first difference between two arrays, and the values there; of plain values the whole."""
    if not isinstance(a, np.ndarray):
        return None if a == b else ("", a, b)
    if np.array_equal(a, b):
        return None
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter]).tolist()
    if not unequal:
        return "", f"{len(a)} tokens", f"{len(b)} tokens"
    return f", token {unequal[0]}", a[unequal[0]].item(), b[unequal[0]].item()
