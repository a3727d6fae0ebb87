"""Which checkpoint is evaluated next, and when evaluations end training (`evaluation.stop_after`).

    checkpoints   0 │ 10 │ 20 │ 30 │ 40 │ 50 │ 60        every = 20
                         done           due       due    60 is evaluated next, and 40 is skipped

    evaluations/ ─► the newest `stop_after` results, none better than one before ─► attempts/<n>.early_stop
                                                                                           │
    trainer, before each step ◄────────────────────────────────────────────────────────────┘

Evaluation takes the processor time that is left, and may fall behind. The newest due version then says more than the
oldest one. The record is written once per attempt, so a trainer that is restarted ends at the version it has then
reached. A later attempt decides anew, by the same results and its own config.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from millrace.evaluation.results import Result, ResultsReader, best_result, comparable
from storage import layout
from storage.checkpoints import Checkpoint
from storage.errors import NotInStore
from storage.json_text import parse_as
from storage.stores.base import Store


def due(newest_first: Iterable[Checkpoint], every: int, is_done: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
    """The checkpoints to evaluate, newest first: of a multiple of `every` versions, and newer than any that is done.

    `newest_first` are the checkpoints in the log, those that were rolled back included, which are never due.
    """
    checkpoints: list[Checkpoint] = []
    lowest: int | None = None
    for checkpoint in newest_first:
        # A trainer starts from the newest: earlier records of the same or a later step were rolled back.
        if lowest is not None and checkpoint.step >= lowest:
            continue
        lowest = checkpoint.step
        if lowest == 0 or lowest % every:
            continue
        if is_done(checkpoint):
            break
        checkpoints.append(checkpoint)
    return checkpoints


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Why training ended early."""

    policy_version: int
    """The newest version evaluated."""
    sentence: str
    """The reason, with the numbers, for people."""


def early_stop(results: Sequence[Result], stop_after: int) -> EarlyStop | None:
    """The reason to stop, if there is one. `results` are in order of versions."""
    scored, best = comparable(results), best_result(results)
    if best is None or len(scored) <= stop_after:
        return None
    later = sum(result["policy_version"] > best["policy_version"] for result in scored)
    if later < stop_after:
        return None
    newest = scored[-1]["policy_version"]
    sentence = (
        f"{later} evaluations up to version {newest} were not better than the {best['accuracy']:.4f} of version "
        f"{best['policy_version']}, and evaluation.stop_after is {stop_after}"
    )
    return EarlyStop(policy_version=newest, sentence=sentence)


def stop_if_no_better(store: Store, attempt: int, stop_after: int) -> None:
    """Asks the attempt's trainer to end if the results stored so far say so."""
    stop = early_stop(ResultsReader(store).read(), stop_after)
    if stop is not None:
        store.put_if_absent(layout.early_stop(attempt), json.dumps(asdict(stop), indent=1).encode())


def read_early_stop(store: Store, attempt: int) -> EarlyStop | None:
    """Why the attempt's trainer is to end early; None if it is not. Raises StreamCorrupt."""
    path = layout.early_stop(attempt)
    try:
        return parse_as(EarlyStop, bytes(store.get(path)), path, "delete it to train on")
    except NotInStore:
        return None
