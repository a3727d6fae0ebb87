"""Reads a run's starts from `run.json` and `attempts/`, and validates them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from configs.stored import AnnotatorPools
from dashboard.read.model import AttemptInfo, RunInfo
from millrace.evaluation.promotion import read_decision
from millrace.runs.record import read_attempt, read_end, read_run
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store


def read_run_info(store: Store, previous: RunInfo | None = None) -> RunInfo:
    """Reads a run's info. With `previous`, the result of an earlier call, reads only data that may have changed.

    Raises RunMissing if the run does not exist, and StreamCorrupt for a malformed record.
    """
    run_id = str(read_run(store)["run_id"]) if previous is None else previous.run_id
    attempts = [] if previous is None else list(previous.attempts)
    while (attempt := _attempt(store, len(attempts))) is not None:
        attempts.append(attempt)
    attempts = [attempt if attempt.end else _with_end(store, attempt) for attempt in attempts]
    return RunInfo(run_id=run_id, url=store.url, attempts=tuple(attempts))


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


def _attempt(store: Store, number: int) -> AttemptInfo | None:
    """Reads attempt `number`; None if it does not exist yet. Checks the config that every page needs."""
    try:
        attempt = AttemptInfo(**vars(read_attempt(store, number)))
        _ = attempt.mode, attempt.transport, attempt.max_staleness
        return attempt
    except NotInStore:
        return None
    except StreamCorrupt:
        raise
    except (KeyError, TypeError, ValueError) as error:
        path = layout.attempt(number) if number else layout.RUN
        raise StreamCorrupt(path, f"expected the record of an attempt: {error!r}") from error


def settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Returns a stored config as text by dotted key; strings are unchanged, other values are JSON."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            texts |= settings(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            # Avoids 3.0000000000000004e-05, but keeps differences in the tenth digit.
            texts[prefix + name] = f"{value:.10g}"
        else:
            texts[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return texts
