"""Faults of a run that were handled, or need a person: restarts, rollbacks, stages that were killed, alarms.

events of stages, supervisors and the controller ─► incidents/<time>-<id>.json, one each ─► status, terminal, summary

Kept for people: nothing is decided from them. An incident that can't be stored is lost.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from storage import layout
from storage.stores.base import Store

_SENTENCES = {
    "stage.restarted": "{stage} was started again: {cause}",
    "stage.killed": "{sentence}",
    "trainer.rolled-back": "{sentence}",
    "trainer.uncompiled": "{sentence}",
    "generator.lost": "{sentence}",
    "probe.alarm": "{sentence}",
    "staleness.length-bias": "{sentence}",
    "selection.starving": "{sentence}",
    "reward.failed": "{sentence}",
    "service.limit-reached": "{sentence}",
    "placement.waiting": "{sentence}",
    "pipeline.stalled": "nothing has moved for {seconds:.0f} s",
    "training.collapsed": "training collapsed: {sentence}",
}
"""The events that are kept, with their sentences. Others are part of a healthy run, or repeat one of these."""
_MAX_OF_A_KIND = 100
"""Incidents kept of each kind in a run, so that an alarm at every step fills no store."""
_MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Incident:
    t: float
    """Unix seconds."""
    kind: str
    sentence: str
    stage: str | None = None
    """The stage that was restarted or killed, such as `train-0`."""


def record_incident(store: Store, kind: str, payload: Mapping[str, Any]) -> None:
    """Stores an event, such as `stage.restarted`, if it is an incident, unless the run has enough of its kind.

    Raises the store's errors.
    """
    template = _SENTENCES.get(kind)
    if template is None or not store.exists(layout.RUN):
        return
    if sum(f"-{kind}-" in path for path in store.list(layout.INCIDENTS)) >= _MAX_OF_A_KIND:
        return
    incident = Incident(t=time.time(), kind=kind, sentence=template.format(**payload), stage=payload.get("stage"))
    name = f"{int(1000 * incident.t):014d}-{kind}-{uuid.uuid4().hex[:8]}"
    store.put_if_absent(f"{layout.INCIDENTS}/{name}.json", json.dumps(asdict(incident)).encode())


def summarize_incidents(incidents: Sequence[Incident]) -> dict[str, Any]:
    """How many there are of each kind, restarts of each stage, and the latest ones. Plain JSON, for a status."""
    counts = Counter(incident.kind for incident in incidents)
    restarts = Counter(incident.stage or "?" for incident in incidents if incident.kind == "stage.restarted")
    return {
        "counts": dict(sorted(counts.items())),
        "restarts": dict(sorted(restarts.items())),
        "latest": [asdict(incident) for incident in incidents[-_MAX_SHOWN:]],
    }
