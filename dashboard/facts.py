"""What is known of a run's starts, from `run.json` and `attempts/`: checked, for whoever looks did not write them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dashboard.data import AttemptFacts, RunFacts
from millrace.errors import RunMissing
from millrace.run import Attempt, how_attempt_ended, read_attempt, read_run
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.store import Store


def read_facts(store: Store, known: RunFacts | None = None) -> RunFacts:
    """A run's facts now; of what was `known` before, only what may have changed is read again.

    Raises RunMissing where there is no run, and StreamCorrupt for a record that no Millrace wrote.
    """
    run_id = _run_id(store) if known is None else known.run_id
    config: Any = None if known is None else known.config
    attempts = [] if known is None else [_ended(store, attempt) for attempt in known.attempts]
    while (attempt := _attempt(store, len(attempts))) is not None:
        config = attempt.config
        attempts.append(_ended(store, _facts(attempt)))
    return RunFacts(run_id=run_id, url=store.url, attempts=tuple(attempts), config=config)


def _run_id(store: Store) -> str:
    try:
        return str(read_run(store)["run_id"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunMissing):
            raise
        raise StreamCorrupt(layout.RUN, "expected a run's record, a JSON object with its run_id") from error


def _attempt(store: Store, number: int) -> Attempt | None:
    """Attempt `number`; None while there is none."""
    path = layout.attempt(number) if number else layout.RUN
    try:
        return read_attempt(store, number)
    except NotInStore:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StreamCorrupt(path, f"expected the record of an attempt: {error}") from error


def _facts(attempt: Attempt) -> AttemptFacts:
    path = layout.attempt(attempt.number) if attempt.number else layout.RUN
    try:
        mode = attempt.config["pipeline"]["mode"]
        return AttemptFacts(
            number=int(attempt.number),
            t_started=float(attempt.t_started),
            first_step=int(attempt.first_step),
            max_staleness=0 if mode == "sync" else int(attempt.config["staleness"]["max_staleness"]),
            mode=str(mode),
            transport=str(attempt.config["weights"]["transport"]),
            ended=None,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StreamCorrupt(path, f"its config is not as expected: {error!r}") from error


def _ended(store: Store, attempt: AttemptFacts) -> AttemptFacts:
    return attempt if attempt.ended else replace(attempt, ended=how_attempt_ended(store, attempt.number))


def replicas(config: Any) -> Sequence[tuple[str, int]]:
    """The stage replicas of a run that measure something, as (stage, replica)."""
    return [
        *(("generate", replica) for replica in range(config["generation"]["replicas"])),
        *(("score", replica) for replica in range(config["scoring"]["replicas"])),
        ("train", 0),
        ("sync_weights", 0),
    ]
