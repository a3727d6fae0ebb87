"""What went wrong in a run and was dealt with, or needs a person: restarts, rollbacks, stages that were killed, alarms.

events of stages, supervisors and the controller ─► incidents/<time>-<id>.json, one each ─► status, terminal, summary

Kept beside the streams, for people: nothing is decided from them. An incident that can't be stored is lost.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.json_text import parse_json
from storage.stores.base import Store

_SENTENCES = {
    "stage.restarted": "{stage} was started again: {cause}",
    "stage.killed": "{sentence}",
    "trainer.rolled-back": "{sentence}",
    "generator.lost": "{sentence}",
    "probe.alarm": "{sentence}",
    "staleness.length-bias": "{sentence}",
    "selection.starving": "{sentence}",
    "reward.failed": "{sentence}",
    "placement.waiting": "{sentence}",
    "pipeline.stalled": "nothing has moved for {seconds:.0f} s",
    "training.collapsed": "training collapsed: {sentence}",
}
"""What is kept, and how it reads. Other events are part of a healthy run, or say the same as one of these."""
_MOST_OF_A_KIND = 100
"""Kept of each kind in a run, so that an alarm at every step fills no store."""
_LATEST = 20


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One of them."""

    t: float
    """Unix seconds."""
    kind: str
    sentence: str
    stage: str | None = None
    """`stage.restarted` and `stage.killed`: which one, such as `train-0`."""


def record_incident(store: Store, kind: str, payload: Mapping[str, Any]) -> None:
    """Stores an event, such as `stage.restarted`, if it is an incident, unless the run has enough of its kind.

    Raises what the store raises.
    """
    template = _SENTENCES.get(kind)
    if template is None or not store.exists(layout.RUN):
        return
    now = time.time()
    name = f"{int(1000 * now):014d}-{kind}-{uuid.uuid4().hex[:8]}"
    if sum(f"-{kind}-" in path for path in store.list(layout.INCIDENTS)) >= _MOST_OF_A_KIND:
        return
    incident = Incident(t=now, kind=kind, sentence=template.format(**payload), stage=payload.get("stage"))
    store.put_if_absent(f"{layout.INCIDENTS}/{name}.json", json.dumps(asdict(incident)).encode())


class IncidentsReader:
    """Reads a run's incidents repeatedly; each `read` gets only new ones from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, Incident] = {}

    def read(self) -> list[Incident]:
        """All so far, oldest first; a torn one is left out."""
        for path in self._store.list(layout.INCIDENTS):
            if path not in self._read and (found := _parse(self._store, path)) is not None:
                self._read[path] = found
        return sorted(self._read.values(), key=lambda incident: incident.t)


def in_short(incidents: list[Incident]) -> dict[str, Any]:
    """As a status has them: how many of each kind, restarts of each stage, and the latest ones. Plain JSON."""
    restarts = Counter(one.stage or "?" for one in incidents if one.kind == "stage.restarted")
    return {
        "counts": dict(sorted(Counter(one.kind for one in incidents).items())),
        "restarts": dict(sorted(restarts.items())),
        "latest": [asdict(one) for one in incidents[-_LATEST:]],
    }


def _parse(store: Store, path: str) -> Incident | None:
    try:
        return Incident(**parse_json(bytes(store.get(path))))
    except (NotInStore, ValueError, TypeError):
        return None
