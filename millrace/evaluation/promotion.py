"""The promotion gate at the end of each attempt, and the log of the checkpoints that passed it.

    evaluation of the latest checkpoint ─┐
                                         ├─► decide ─promoted─► weights/promoted/data/… ─► weights/promoted/log: record
    last promoted one's, or at first ────┘      │               (a Hugging Face folder)    (the commit)
    the start model's                           └─either way──► attempts/<n>.promotion: the decision, and why

The promoted checkpoint is the one in the log's last record. `millrace.stages.promote` does the work.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.errors import InputError, writing
from millrace.evaluation.results import Result, comparable, read_result
from storage import layout
from storage.checkpoints import Checkpoint, read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_as
from storage.stores.base import Store, checked_path
from storage.streams.files import get_file


@dataclass(frozen=True, kw_only=True)
class PromotionDecision:
    """The gate's decision on one checkpoint."""

    promoted: bool
    policy_version: int
    accuracy: float | None
    """Accuracy on held-out prompts, of several sources the weighted mean; None if it was not measured."""
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

    decision: PromotionDecision
    evaluation: Result
    """The result that it was promoted for."""
    incarnation: int
    """Incarnation of the trainer that made the checkpoint."""
    attempt: int
    """The attempt that promoted it."""


def decide(
    policy_version: int,
    candidate: Result | None,
    *,
    promoted: Result | None,
    start: Result | None,
    margin: float | None,
) -> PromotionDecision:
    """Whether the checkpoint of `policy_version`, with the result `candidate`, is promoted.

    Its accuracy must exceed that of the last `promoted` one, or of the `start` model if there is none, by more than
    `margin`, both under the candidate's weights of the sources; a margin of None promotes nothing. A version whose
    result is None has no accuracy.
    """
    bar, passes = promoted or start, False
    if margin is None:
        reason = "promotion.margin is null, so nothing is promoted"
    elif policy_version == 0:
        reason = "it is the start model itself"
    elif promoted is not None and promoted["policy_version"] == policy_version:
        reason = "it is the promoted version already"
    elif candidate is None:
        reason = f"it has no held-out accuracy; expected one in {layout.evaluation(policy_version)}"
    elif bar is None:
        reason = f"the start model, the first bar, has no accuracy; expected one in {layout.evaluation(0)}"
    else:
        name = "the start model" if promoted is None else f"version {promoted['policy_version']} (promoted last)"
        same = comparable([bar, candidate])
        if len(same) < 2:
            reason = (
                f"it was evaluated on {_prompts(candidate)} and {name} on {_prompts(bar)}, so they can't be compared; "
                "expected the same prompts"
            )
        else:
            bar = same[0]
            passes = candidate["accuracy"] > bar["accuracy"] + margin
            reason = (
                f"its held-out accuracy {candidate['accuracy']:.4f} {'exceeds' if passes else 'does not exceed'} the "
                f"{bar['accuracy']:.4f} of {name} by more than promotion.margin {margin:g}"
            )
    return PromotionDecision(
        promoted=passes,
        policy_version=policy_version,
        accuracy=None if candidate is None else candidate["accuracy"],
        sentence=f"version {policy_version} is {'promoted' if passes else 'held back'}: {reason}",
        bar=None if bar is None else bar["accuracy"],
    )


def _prompts(result: Result) -> str:
    """The held-out prompts of a result in words, such as `128 prompts of math and 64 prompts of words`."""
    by_source = [f"{result['sets'][name]['prompts']} prompts of {name}" for name in result.get("weights", ())]
    return " and ".join(by_source) or f"{result['prompts']} prompts"


def read_scored_result(store: Store, policy_version: int) -> Result | None:
    """The result of one policy version; None if it was not evaluated or scored, or can't be read."""
    result = read_result(store, policy_version)
    return None if result is None or result["accuracy"] is None else result


def write_decision(store: Store, attempt: int, decision: PromotionDecision) -> None:
    """Stores the decision at the end of `attempt`. An earlier one is kept."""
    store.put_if_absent(layout.promotion(attempt), json.dumps(asdict(decision), indent=1).encode())


def read_decision(store: Store, attempt: int) -> PromotionDecision | None:
    """The decision at the end of `attempt`; None if the attempt did not get that far, or its file can't be read."""
    path = layout.promotion(attempt)
    try:
        return parse_as(PromotionDecision, bytes(store.get(path)), path)
    except (NotInStore, StreamCorrupt):
        return None


def promotion_of(record: Checkpoint) -> Promotion:
    """The promotion in a record of the log. Raises StreamCorrupt if the record is of another kind."""
    return parse_as(Promotion, record.state, layout.PROMOTED)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill, which becomes `folder` at the end: with all files, or after an error not at all.

    Raises InputError if it can't be written, or unless it is empty or missing: a model is not mixed with other files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("it exists", file=folder, expected="a new or empty folder for the model")
    with writing(folder):
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".tmp-") as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            yield made
            made.rename(folder)


def fetch_promoted(store: Store, folder: Path) -> Promotion:
    """Writes the promoted checkpoint, verified, as a Hugging Face folder at `folder`: all of it, or nothing.

    Raises InputError if nothing is promoted yet or `folder` is not empty, StreamCorrupt if a file is damaged.
    """
    record = read_latest(store, layout.PROMOTED)
    if record is None:
        raise InputError("no checkpoint has been promoted yet", file=store.url)
    promotion = promotion_of(record)
    with new_folder(folder) as model:
        for name, ref in record.files.items():
            # The run may be untrusted: its file names must stay below the folder.
            file = model / checked_path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(get_file(store, ref))
    return promotion
