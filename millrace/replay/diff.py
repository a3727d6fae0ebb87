"""Where two stored runs first differ, from config to data to loss: `millrace diff RUN_A RUN_B`.

start_hashes.json ─► start model, tokenizer ┐
║ consumed ║ ─► first differences           ├─► Diff: every kind of difference, and the first step of each
attempts/ of that step ─► config, provenance│
║ checkpoints ║ ─► checksums of the weights ┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.replay.first_difference import FirstDifference, first_differences
from millrace.replay.sources.source_run import SourceRun
from millrace.runs.record import attempt_of_step, differences, latest_attempt
from millrace.runs.start_hashes import read_start_hashes
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
    batch, numbers = first_differences(run_a, run_b, steps)
    # In the same step, the batch comes before the numbers.
    first = min((one for one in (batch, numbers) if one), key=lambda one: one.step, default=None)
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
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


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
