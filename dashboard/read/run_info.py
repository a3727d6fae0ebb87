"""Reads a run's starts from `run.json` and `attempts/`, and validates them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.stored import AnnotatorPools
from dashboard.read.model import AttemptInfo, RunInfo
from millrace.errors import RunMissing
from millrace.evaluation.promotion import read_decision
from millrace.runs.record import read_attempt, read_end, read_run
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store


def read_run_info(store: Store, previous: RunInfo | None = None) -> RunInfo:
    """Reads a run's info. With `previous`, the result of an earlier call, reads only data that may have changed.

    Raises RunMissing if the run does not exist, and StreamCorrupt for a malformed record.
    """
    run_id = _run_id(store) if previous is None else previous.run_id
    config: Any = None if previous is None else previous.config
    attempts = [] if previous is None else list(previous.attempts)
    while (next_attempt := _attempt(store, len(attempts))) is not None:
        config = next_attempt[1]
        attempts.append(next_attempt[0])
    attempts = [attempt if attempt.end else _with_end(store, attempt) for attempt in attempts]
    return RunInfo(run_id=run_id, url=store.url, attempts=tuple(attempts), config=config)


def replicas(config: Any) -> Sequence[tuple[str, int]]:
    """Returns the (stage, replica) pairs that write metrics."""
    pools = AnnotatorPools.of(config)
    return [
        *(("generate", replica) for replica in range(config["generation"]["replicas"])),
        *(("score", replica) for replica in range(pools.total("scores"))),
        *(("teach", replica) for replica in range(pools.total("teachers"))),
        ("train", 0),
        ("sync_weights", 0),
    ]


def _with_end(store: Store, attempt: AttemptInfo) -> AttemptInfo:
    # The promotion gate decides before the end is recorded.
    if (end := read_end(store, attempt.number)) is None:
        return attempt
    return replace(attempt, end=end, promotion=read_decision(store, attempt.number))


def _run_id(store: Store) -> str:
    try:
        return str(read_run(store)["run_id"])
    except RunMissing:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise StreamCorrupt(layout.RUN, "expected a run's record, a JSON object with its run_id") from error


def _attempt(store: Store, number: int) -> tuple[AttemptInfo, Any] | None:
    """Reads attempt `number` and its config; None if it does not exist yet."""
    try:
        attempt = read_attempt(store, number)
        config = attempt.config
        return AttemptInfo(
            number=int(attempt.number),
            t_started=float(attempt.t_started),
            first_step=int(attempt.first_step),
            max_staleness=attempt.max_staleness,
            mode=str(config["pipeline"]["mode"]),
            transport=str(config["weights"]["transport"]),
            end=None,
            changes=tuple(map(str, attempt.changes)),
            origin=attempt.origin,
        ), config
    except NotInStore:
        return None
    except StreamCorrupt:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        path = layout.attempt(number) if number else layout.RUN
        raise StreamCorrupt(path, f"expected the record of an attempt: {error!r}") from error
