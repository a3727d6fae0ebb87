"""The promotion gate at the end of each attempt, and the log of the checkpoints that passed it.

    evaluation of the latest checkpoint ─┐
                                         ├─► decide ─promoted─► weights/promoted/data/… ─► weights/promoted/log: record
    last promoted one's, or at first ────┘      │               (a Hugging Face folder)    (the commit)
    the start model's                           └─either way──► attempts/<n>.promotion: the decision, and why

The promoted checkpoint is the one in the log's last record. `millrace.stages.promote` does the work.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.errors import InputError
from millrace.evaluation.results import read_result
from storage import layout
from storage.checkpoints import Checkpoint, read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_as
from storage.stores.base import Store, checked_path
from storage.streams.files import get_file


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
    """Accuracy on held-out prompts; None if it was not measured."""
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
class Promotion:
    """The promotion of a checkpoint, the state in its record of the log. The record's files are the model's."""

    decision: Decision
    evaluation: Evaluation
    incarnation: int
    """Incarnation of the trainer that made the checkpoint."""
    attempt: int
    """The attempt that promoted it."""


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
    bar, passes = promoted or start, False
    if margin is None:
        reason = "promotion.margin is null, so nothing is promoted"
    elif policy_version == 0:
        reason = "it is the start model itself"
    elif promoted is not None and promoted.policy_version == policy_version:
        reason = "it is the promoted version already"
    elif candidate is None:
        reason = f"it has no held-out accuracy; expected one in {layout.evaluation(policy_version)}"
    elif bar is None:
        reason = f"the start model, the first bar, has no accuracy; expected one in {layout.evaluation(0)}"
    else:
        name = f"version {bar.policy_version} (promoted last)" if bar.policy_version else "the start model"
        passes = candidate.prompts == bar.prompts and candidate.accuracy > bar.accuracy + margin
        reason = (
            f"its held-out accuracy {candidate.accuracy:.4f} {'exceeds' if passes else 'does not exceed'} the "
            f"{bar.accuracy:.4f} of {name} by more than promotion.margin {margin:g}"
        )
        if candidate.prompts != bar.prompts:
            reason = (
                f"it was evaluated on {candidate.prompts} prompts and {name} on {bar.prompts}, so they can't be "
                "compared; expected the same prompts"
            )
    return Decision(
        promoted=passes,
        policy_version=policy_version,
        accuracy=None if candidate is None else candidate.accuracy,
        sentence=f"version {policy_version} is {'promoted' if passes else 'held back'}: {reason}",
        bar=None if bar is None else bar.accuracy,
    )


def read_evaluation(store: Store, policy_version: int) -> Evaluation | None:
    """The held-out results of one policy version; None if it was not evaluated or scored, or can't be read."""
    result = read_result(store, policy_version)
    if result is None or result["accuracy"] is None:
        return None
    return Evaluation(policy_version=policy_version, accuracy=result["accuracy"], prompts=result["prompts"])


def write_decision(store: Store, attempt: int, decision: Decision) -> None:
    """Stores the decision at the end of `attempt`. An earlier one is kept."""
    store.put_if_absent(layout.promotion(attempt), json.dumps(asdict(decision), indent=1).encode())


def read_decision(store: Store, attempt: int) -> Decision | None:
    """The decision at the end of `attempt`; None if the attempt did not get that far, or its file can't be read."""
    path = layout.promotion(attempt)
    try:
        return parse_as(Decision, bytes(store.get(path)), path)
    except (NotInStore, StreamCorrupt):
        return None


def promotion_of(record: Checkpoint) -> Promotion:
    """The promotion in a record of the log. Raises StreamCorrupt if the record is of another kind."""
    return parse_as(Promotion, record.state, layout.PROMOTED)


def latest_promoted(store: Store) -> Promotion | None:
    """The promoted checkpoint, if there is one. Raises StreamCorrupt."""
    record = read_latest(store, layout.PROMOTED)
    return None if record is None else promotion_of(record)


def check_empty(folder: Path) -> None:
    """Raises InputError unless `folder` is empty or missing, so that a model is not mixed with other files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("it exists", file=folder, expected="a new or empty folder for the model")


def fetch_promoted(store: Store, folder: Path) -> Promotion:
    """Writes the promoted checkpoint, verified, as a Hugging Face folder at `folder`: all of it, or nothing.

    Raises InputError if nothing is promoted yet or `folder` is not empty, StreamCorrupt if a file is damaged.
    """
    record = read_latest(store, layout.PROMOTED)
    if record is None:
        raise InputError("no checkpoint has been promoted yet", file=store.url)
    promotion = promotion_of(record)
    check_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        model = Path(temporary) / "model"
        model.mkdir()
        for name, ref in record.files.items():
            # The run may be untrusted: its file names must stay below the folder.
            file = model / checked_path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(get_file(store, ref))
        model.rename(folder)
    return promotion
