"""Where two stored runs part, from config to data to loss: `millrace diff RUN_A RUN_B`.

start_hashes.json ─► start model, tokenizer ┐
║ consumed ║ and what it names ─► partings  ├─► Diff: every kind of difference, and the first step of each
attempts/ as of there ─► config, provenance │
║ checkpoints ║ ─► checksums of the weights ┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.checkpointing.names import weights_checksum
from millrace.replay.parting import Parting, Partings, partings
from millrace.replay.stored import StoredRun
from millrace.run import attempt_of_step, differences, latest_attempt
from millrace.start_hashes import read_start_hashes
from storage import layout
from storage.log import backwards
from storage.schema import SCORE
from storage.store import Store
from storage.stream import read_part, stream_head

_CONSEQUENCES = {
    "trainer_logprobs": "the same batch, but the weights before the step differ",
    "loss": "the same batch and the same log-probabilities, but the loss differs",
    "grad_norm": "the same batch and the same loss, but the gradient differs",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that two runs do not share."""

    name: str
    """Dotted key of a config, or what it is of."""
    a: Any
    """In run A, plain JSON; None where it has none."""
    b: Any


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What two runs share, and where they part."""

    run_a: str
    """Its URL."""
    run_b: str
    config: list[Difference]
    """By dotted key: of the configs in force where they part, or, where they don't, of the newest ones."""
    provenance: list[Difference]
    """Of the same starts: code, libraries, machine, and the version of the reward."""
    start: list[Difference]
    """SHA-256 of the start model's and the tokenizer's files, by file name; empty where a run does not know its own."""
    steps: list[int]
    """The first and the last step that both have; empty where they have none in common."""
    batch: Parting | None
    """Where they trained on something else for the first time."""
    numbers: Parting | None
    """Where something else came out for the first time."""
    checkpoints: list[int]
    """Versions of which both have a checkpoint whose files are there."""
    checkpoints_differing: list[int]
    """Of these, those whose weights differ, by CRC-32C."""
    sentence: str
    """The verdict, for people."""


def diff(store_a: Store, store_b: Store) -> Diff:
    """Compares the runs in two stores.

    Raises RunMissing, ReplayError where one stored too little, and StreamCorrupt or PartRemoved where rows or records
    can't be read any more.
    """
    run_a, run_b = StoredRun(store_a), StoredRun(store_b)
    parted = partings(run_a, run_b)
    parting = _first(parted)
    stores = (store_a, store_b)
    attempts = [latest_attempt(s) if parting is None else attempt_of_step(s, parting.step) for s in stores]
    made_by = differences(attempts[0].provenance, attempts[1].provenance)
    rewards = [_verifier_version(s, attempt.config) for s, attempt in zip(stores, attempts, strict=True)]
    if None not in rewards and rewards[0] != rewards[1]:
        made_by["reward version"] = (rewards[0], rewards[1])
    weights_a, weights_b = _weights(run_a), _weights(run_b)
    both = sorted(weights_a.keys() & weights_b.keys())
    differing = [step for step in both if weights_a[step] != weights_b[step]]
    return Diff(
        run_a=run_a.url,
        run_b=run_b.url,
        config=_unlike(_flat(attempts[0].config), _flat(attempts[1].config)),
        provenance=[Difference(name=name, a=a, b=b) for name, (a, b) in made_by.items()],
        start=_start(store_a, store_b),
        steps=parted.steps,
        batch=parted.batch,
        numbers=parted.numbers,
        checkpoints=both,
        checkpoints_differing=differing,
        sentence=_sentence(parted, both, differing),
    )


def _first(parted: Partings) -> Parting | None:
    """What a step is trained on comes before what comes out of it."""
    found = [parting for parting in (parted.batch, parted.numbers) if parting is not None]
    return min(found, key=lambda parting: parting.step, default=None)


def _sentence(parted: Partings, checkpoints: list[int], differing: list[int]) -> str:
    if not parted.steps:
        return "they have no step in common"
    first, last = parted.steps
    parting = _first(parted)
    if parting is None:
        weights = f"{len(checkpoints) - len(differing)} of {len(checkpoints)} checkpoints"
        return f"steps {first} to {last} are the same, bit for bit: batches and numbers; so are {weights}"
    before = f"they are the same before step {parting.step} and " if parting.step > first else "they "
    if parting is parted.batch:
        why = f"what was trained on: {parting.what}"
    else:
        why = f"{parting.what}: {_CONSEQUENCES[parting.what]}"
    return f"{before}part at step {parting.step} in {why} ({parting.where})"


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


def _start(store_a: Store, store_b: Store) -> list[Difference]:
    a, b = read_start_hashes(store_a), read_start_hashes(store_b)
    return [] if a is None or b is None else _unlike(a, b)


def _verifier_version(store: Store, config: Mapping[str, Any]) -> str | None:
    """Which version of the reward gave the newest scores; None where there are none."""
    scoring = config["scoring"]
    path = layout.scores(scoring["reward"], 0, 0, scoring["replicas"])
    for record in backwards(store, path, stream_head(store, path)):
        if record.kind == "data":
            versions = read_part(store, path, SCORE, record, columns=["verifier_version"])["verifier_version"]
            version: str = versions[-1].as_py()
            return version
    return None


def _weights(run: StoredRun) -> dict[int, str]:
    """What tells the weights of each stored checkpoint apart, by policy version; other ranks write other files."""
    return {step: weights_checksum(checkpoint) for step, checkpoint in run.checkpoints.items()}
