"""What a replay is to do: written into its own run before anything runs, read by its stages."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from millrace.replay.plan import Order
from millrace.replay.selection import Selection
from storage import layout
from storage.errors import NotInStore
from storage.store import Store

Job = Literal["verify", "train", "compare"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One stored run."""

    url: str
    share: float = 1.0
    """Its part of every batch, relative to the other sources'."""


@dataclass(frozen=True, kw_only=True)
class ReplaySpec:
    """One replay. Without a job it only scores anew."""

    sources: tuple[Source, ...]
    job: Job | None
    """verify: train the original batches again, and compare. train: train anew. compare: several losses, untrained."""
    rescore: bool = False
    """First score the stored trajectories with `scoring.reward` of the replay's own config; a training uses that."""
    selection: Selection = field(default_factory=Selection)
    order: Order = "stored"
    """train: the order of the groups."""
    start_step: int | None = None
    """Policy version of the first source that it begins with, one of its checkpoints; None: the start model."""
    tolerance: float | None = None
    """verify: largest difference between weights that passes; None: they must be the same bit for bit."""
    losses: tuple[str, ...] = ()
    """compare: names of losses, at least two."""
    own_copies: bool = False
    """compare: each loss trains a copy of the policy of its own."""


def write_spec(store: Store, spec: ReplaySpec) -> None:
    """Once, when the replay's run is made."""
    store.put_if_absent(layout.REPLAY, json.dumps(asdict(spec), indent=1).encode())


def read_spec(store: Store) -> ReplaySpec | None:
    """None where the run is no replay."""
    try:
        values = json.loads(bytes(store.get(layout.REPLAY)))
    except NotInStore:
        return None
    return ReplaySpec(
        **{
            **values,
            "sources": tuple(Source(**source) for source in values["sources"]),
            "selection": Selection(**values["selection"]),
            "losses": tuple(values["losses"]),
        }
    )
