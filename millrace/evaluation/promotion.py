"""The promotion gate at the end of each attempt, and the log of the checkpoints that passed it.

    evaluation of the latest checkpoint ─┐
                                         ├─► decide ─promoted─► weights/promoted/data/… ─► weights/promoted/log: record
    last promoted one's, or at first ────┘      │               (a Hugging Face folder)    (the commit)
    the start model's                           └─either way──► attempts/<n>.promotion: the decision, and why

The promoted checkpoint is the one in the log's last record. `millrace.stages.promote` does the work.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.evaluation.results import read_result
from storage import layout
from storage.checkpoints import Checkpoint, read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store, checked_path
from storage.streams.files import FileRef, get_file


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good one policy version was on held-out prompts."""

    policy_version: int
    accuracy: float
    """Mean reward of greedy responses; in [0, 1] for rewards that are."""
    prompts: int
    """Number of prompts."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The gate's decision on one checkpoint."""

    promoted: bool
    policy_version: int
    accuracy: float | None
    """On held-out prompts; None if it was not measured."""
    sentence: str
    """The reason, with the numbers, for people."""
    bar: float | None
    """The accuracy that it had to exceed; None if there was none."""

    @property
    def headline(self) -> str:
        """The decision in a few words, such as `v90 promoted, 0.340 → 0.570`."""
        what = f"v{self.policy_version} {'promoted' if self.promoted else 'held back'}"
        if self.accuracy is None or self.bar is None:
            return what
        return f"{what}, {self.bar:.3f} → {self.accuracy:.3f}"


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """A promoted checkpoint."""

    decision: Decision
    """The decision to promote it."""
    evaluation: Evaluation
    incarnation: int
    """Incarnation of the trainer that made it."""
    attempt: int
    """The attempt that promoted it."""
    files: Mapping[str, FileRef]
    """The files of a Hugging Face folder, by name; `fetch_promoted` writes them out."""


def decide(
    policy_version: int,
    candidate: Evaluation | None,
    *,
    promoted: Evaluation | None,
    start: Evaluation | None,
    margin: float | None,
) -> Decision:
    """Whether the checkpoint of `policy_version`, measured as `candidate`, is promoted.

    Its accuracy must exceed that of the last `promoted` one, or of the `start` model if there is none, by more than
    `margin`; a margin of None promotes nothing. An evaluation of None does not exist.
    """
    bar = start if promoted is None else promoted
    accuracy = None if candidate is None else candidate.accuracy
    reason = _reason_against(policy_version, candidate, bar, promoted, margin)
    if reason is None:
        assert candidate is not None and bar is not None
        sentence = (
            f"version {policy_version} is promoted: its held-out accuracy {candidate.accuracy:.4f} exceeds "
            f"the {bar.accuracy:.4f} of {_name(bar)} by more than promotion.margin {margin:g}"
        )
    else:
        sentence = f"version {policy_version} is held back: {reason}"
    return Decision(
        promoted=reason is None,
        policy_version=policy_version,
        accuracy=accuracy,
        sentence=sentence,
        bar=None if bar is None else bar.accuracy,
    )


def _reason_against(
    policy_version: int,
    candidate: Evaluation | None,
    bar: Evaluation | None,
    promoted: Evaluation | None,
    margin: float | None,
) -> str | None:
    if margin is None:
        return "promotion.margin is null, so nothing is promoted"
    if policy_version == 0:
        return "it is the start model itself"
    if promoted is not None and promoted.policy_version == policy_version:
        return "it is the promoted version already"
    if candidate is None:
        return f"it has no held-out accuracy; expected one in {layout.evaluation(policy_version)}"
    if bar is None:
        return f"the start model, the bar for the first one, has no accuracy; expected one in {layout.evaluation(0)}"
    if candidate.prompts != bar.prompts:
        return (
            f"it was evaluated on {candidate.prompts} prompts and {_name(bar)} on {bar.prompts}, so they can't be "
            "compared; expected the same prompts"
        )
    if not candidate.accuracy > bar.accuracy + margin:
        return (
            f"its held-out accuracy {candidate.accuracy:.4f} does not exceed the {bar.accuracy:.4f} of {_name(bar)} "
            f"by more than promotion.margin {margin:g}"
        )
    return None


def _name(bar: Evaluation) -> str:
    return "the start model" if bar.policy_version == 0 else f"version {bar.policy_version} (promoted last)"


def read_evaluation(store: Store, policy_version: int) -> Evaluation | None:
    """The held-out results of one policy version; None if it was not evaluated or scored, or can't be read."""
    result = read_result(store, policy_version)
    if result is None or result["accuracy"] is None:
        return None
    return Evaluation(policy_version=policy_version, accuracy=result["accuracy"], prompts=result["prompts"])


def write_decision(store: Store, attempt: int, decision: Decision) -> None:
    """Store the decision at the end of `attempt`. An earlier one is kept."""
    store.put_if_absent(layout.promotion(attempt), json.dumps(asdict(decision), indent=1).encode())


def read_decision(store: Store, attempt: int) -> Decision | None:
    """The decision at the end of `attempt`; None if the attempt did not get that far, or its file can't be read."""
    try:
        decision = Decision(**parse_json(bytes(store.get(layout.promotion(attempt)))))
    except (NotInStore, ValueError, TypeError):
        return None
    numbers = all(isinstance(number, float | int | None) for number in (decision.accuracy, decision.bar))
    typed = type(decision.promoted) is bool and type(decision.policy_version) is int
    return decision if numbers and typed and isinstance(decision.sentence, str) else None


def state_of(promoted: Decision, evaluation: Evaluation, *, incarnation: int, attempt: int) -> dict[str, Any]:
    """The state in the record of a promotion, plain JSON; `promoted_of` is the inverse."""
    return {
        "incarnation": incarnation,
        "attempt": attempt,
        "accuracy": evaluation.accuracy,
        "prompts": evaluation.prompts,
        "sentence": promoted.sentence,
        "bar": promoted.bar,
    }


def promoted_of(record: Checkpoint) -> Promoted:
    """The promotion in a record of the log. Raises StreamCorrupt if the record is of another kind."""
    state, version = record.state, record.step
    try:
        evaluation = Evaluation(policy_version=version, accuracy=state["accuracy"], prompts=state["prompts"])
        decision = Decision(
            promoted=True,
            policy_version=version,
            accuracy=evaluation.accuracy,
            sentence=state["sentence"],
            bar=state["bar"],
        )
        return Promoted(
            decision=decision,
            evaluation=evaluation,
            incarnation=state["incarnation"],
            attempt=state["attempt"],
            files=record.files,
        )
    except (KeyError, TypeError) as error:
        raise StreamCorrupt(layout.PROMOTED, f"version {record.step} has no promotion's record: {error!r}") from error


def latest_promoted(store: Store) -> Promoted | None:
    """The promoted checkpoint, if there is one. Raises StreamCorrupt."""
    record = read_latest(store, layout.PROMOTED)
    return None if record is None else promoted_of(record)


def check_empty(folder: Path) -> None:
    """Raises InputError unless `folder` is empty or missing, so that a model is not mixed with other files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already: expected a folder that is not, or is empty, for the model")


def fetch_promoted(store: Store, folder: Path) -> Promoted:
    """Write the promoted checkpoint, verified, as a Hugging Face folder at `folder`: all of it, or nothing.

    Raises InputError if nothing is promoted yet or `folder` is not empty, StreamCorrupt if a file is damaged.
    """
    promoted = latest_promoted(store)
    if promoted is None:
        raise InputError(f"{store.url}: no checkpoint has been promoted yet")
    check_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        for name, ref in promoted.files.items():
            # The run may be untrusted: its file names must stay below the folder.
            file = made / checked_path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(get_file(store, ref))
        made.rename(folder)
    return promoted
