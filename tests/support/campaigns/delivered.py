"""Reads from a finished run which weights its generators used.

checkpoints, start model ─► digest of each version      trajectories ─► versions that tokens are tagged with
metrics ─► versions that were pushed, received          Prefect's logs ─► milestones
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from support.campaigns.prefect_server import find
from support.campaigns.weight_campaigns import GENERATORS, Version

from millrace.models.loading import load_model
from millrace.training.checkpoints.policy_state import load_weights
from millrace.weights.fingerprint import fingerprint
from storage import layout
from storage.checkpoints import checkpoints_backwards
from storage.schema import METRIC, TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """A generator process that tagged tokens with a version."""

    generator: int
    epoch: int
    """Counts the processes of that generator, from 0."""
    version: Version


def digests(run: Path, start_model: Path, dtype: str) -> dict[Version, str]:
    """Digests of the start model and of every checkpointed version, each cast to the generators' `dtype`."""
    store = open_store(str(run))
    base = {name: parameter.detach() for name, parameter in load_model(start_model, "float32").named_parameters()}
    found = {(0, 0): _digest(base, dtype)}
    for checkpoint in checkpoints_backwards(store):
        found[checkpoint.incarnation, checkpoint.step] = _digest(load_weights(store, checkpoint, base), dtype)
    return found


def _digest(tensors: dict[str, torch.Tensor], dtype: str) -> str:
    return fingerprint({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}).digest


def tagged(run: Path) -> set[Tagged]:
    """Every version that tokens of the run's trajectories are tagged with, and the generator process."""
    found = set()
    for generator in GENERATORS:
        reader = StreamReader(open_store(str(run)), layout.trajectories(generator), TRAJECTORY)
        while (part := reader.next()) is not None:
            for row in part.table.select(["incarnation", "epoch", "span_versions"]).to_pylist():
                for version in row["span_versions"]:
                    found.add(Tagged(generator=generator, epoch=row["epoch"], version=(row["incarnation"], version)))
    return found


def measured(run: Path, stage: str, replica: int, name: str) -> set[Version]:
    """Versions for which this stage's metrics have a row of this name."""
    reader, found = StreamReader(open_store(str(run)), layout.metrics(stage, replica), METRIC), set()
    while (part := reader.next()) is not None:
        for row in part.table.to_pylist():
            if row["name"] == name:
                found.add((row["incarnation"], row["policy_version"]))
    return found


def stored_kinds(run: Path) -> list[str]:
    """How each version is stored, in order: `anchor` or `delta`."""
    log = LogReader(open_store(str(run)), layout.WEIGHTS)
    return [record.body["state"]["kind"] for record in iter(log.next, None) if record.kind == "checkpoint"]


def milestones(prefect_api: str, run_id: str) -> list[str]:
    """The log messages of the run's stages, in order."""

    (run,) = find(prefect_api, "flow_runs", flow_runs={"name": {"any_": [run_id]}})
    logs = find(prefect_api, "logs", logs={"flow_run_id": {"any_": [run["id"]]}}, sort="TIMESTAMP_ASC", limit=200)
    return [log["message"] for log in logs]
