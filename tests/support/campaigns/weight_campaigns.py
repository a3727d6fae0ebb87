"""Campaigns that test weight sync: two generators, a tiny policy, and an end that waits for every generator.

campaign ─► … ─► last hand-over: the trainer waits ─► every generator holds that version ─► it continues ─► ended

Without that wait, a campaign may end before the generators have received its last version.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from support.campaigns.campaigns import Ended, Millrace, stages_of, wait_until
from support.campaigns.start_model import make_start_model
from support.streams.rows import read_rows

from millrace.models.loading import load_model
from millrace.runs.record import latest_attempt
from millrace.runtime.arguments import attempt_config
from millrace.training.checkpoints.policy_state import load_adapter, load_weights
from millrace.training.trainer import Trainer, load_trainer
from millrace.weights.fingerprint import Fingerprint, fingerprint
from storage import layout
from storage.checkpoints import Checkpoint, checkpoints_backwards, read_latest
from storage.progress import read_status
from storage.schema import METRIC, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogReader

GENERATORS = (0, 1)
GROUPS_PER_STEP, GROUP_SIZE = 8, 4
_PROMPTS: dict[str, object] = {
    "prompts.digits": 1,
    "prompts.num_eval": 8,
}
_PATIENCE_SECONDS = 300.0
_LAST_WAIT = "train-0 train.after_last_handover 1 hang"
_LOOK_SECONDS = 0.02

Tensors = dict[str, torch.Tensor]
Version = tuple[int, int]
"""Incarnation, policy version."""


def make_weak_start_model(folder: Path, hidden_size: int = 32) -> None:
    """Saves a policy that answers one sum in five, so that rewards differ and each step changes the weights."""
    recipe: dict[str, Any] = {
        "hidden_size": hidden_size, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "error_rate": 0.3,
        "target_imitation_rate": 1.0, "max_accuracy": 0.0, "max_steps": 30, "batch_size": 128, "learning_rate": 4e-3,
    }  # fmt: skip
    make_start_model(folder, [f"{key}={json.dumps(value)}" for key, value in {**_PROMPTS, "seed": 0}.items()], **recipe)


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """The weights that a generator reported to use."""

    generator: int
    version: Version
    digest: str
    route: str


class WeightCampaign:
    """A campaign of `steps` steps over `transport`, running while its `with` block lasts.

    `run_id` must be unique in the session. `fired`: folder in which failpoints record that they fired.
    """

    def __init__(
        self,
        millrace: Millrace,
        run_id: str,
        transport: str,
        start_model: Path,
        fired: Path,
        *failpoints: str,
        steps: int,
        **settings: object,
    ) -> None:
        self.run_id = run_id
        self.run = millrace.root / run_id
        self.steps = steps
        self.store: Store = millrace.store(run_id)
        self.failpoints = millrace.arm(fired, *failpoints, _LAST_WAIT)
        self.acknowledged: dict[Acknowledged, None] = {}
        """The reports that were seen, in order. Some may have been missed."""
        self._start_model = start_model
        self._millrace = millrace
        self._settings = {
            **_PROMPTS,
            "model.path": str(start_model),
            "generation.replicas": len(GENERATORS),
            "generation.group_size": GROUP_SIZE,
            "generation.groups_per_batch": GROUPS_PER_STEP // len(GENERATORS),
            "training.groups_per_step": GROUPS_PER_STEP,
            "training.max_steps": steps,
            # Keeps the digest of every version for comparison.
            "training.checkpoint_every": 1,
            "staleness.max_staleness": 8,
            "weights.transport": transport,
            # The trainer waits until the generators have caught up.
            "supervision.hang_seconds": 2 * _PATIENCE_SECONDS,
            **settings,
        }
        self._over = threading.Event()
        self._monitor = threading.Thread(target=self._collect, daemon=True)

    def __enter__(self) -> "WeightCampaign":
        self._process = self._millrace.start(*self._millrace.campaign(self.run_id, **self._settings))
        self._monitor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._monitor.join()
        # A process that a failed test left stopped would not notice that its controller has died.
        for process in stages_of(self.run):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def status(self, stage: str, replica: int = 0) -> dict[str, Any]:
        return read_status(self.store, stage, replica)

    def process(self, stage: str, replica: int = 0) -> psutil.Process:
        return psutil.Process(self.status(stage, replica)["pid"])

    @property
    def trainer_version(self) -> int:
        return self._millrace.version(self.run_id)

    def lead(self) -> int:
        """The trajectories of generator 0 minus those of generator 1."""
        first, second = (self.status("generate", generator).get("rollouts", 0) for generator in GENERATORS)
        return int(first - second)

    def version_of_generator(self, generator: int) -> int:
        """A generator's policy version; −1 before it has one."""
        version: int = self.status("generate", generator).get("policy_version", -1)
        return version

    def checkpointed(self) -> int:
        """The version of the newest checkpoint; −1 before there is one."""
        newest = read_latest(self.store)
        return -1 if newest is None else newest.step

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails with the campaign's output if it ends before that."""

        def look() -> bool:
            assert self._process.poll() is None, f"while waiting for {what}: {self._process.communicate()[0]}"
            return condition()

        wait_until(look, what, _PATIENCE_SECONDS)

    def finish(self) -> Ended:
        """Releases the trainer once every generator holds the last version, and waits for the end."""
        self.wait_until(lambda: self.failpoints.has_fired(_LAST_WAIT), f"version {self.steps} to be handed over")
        self.wait_until(
            lambda: all(self.version_of_generator(generator) == self.steps for generator in GENERATORS),
            f"every generator to hold version {self.steps}",
        )
        self.failpoints.release(_LAST_WAIT)
        output, _ = self._process.communicate(timeout=_PATIENCE_SECONDS)
        return Ended(self._process.returncode, output)

    def digests(self, dtype: str, hashed: Callable[[Tensors], Fingerprint] = fingerprint) -> dict[Version, str]:
        """Digests of the start model and of every checkpointed version, each cast to the generators' `dtype`.

        Of a LoRA run those of the adapters, which travel in float32. `hashed` hashes as the transport does.
        """

        def digest(tensors: Tensors) -> str:
            return hashed({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}).digest

        model = load_model(self._start_model, "float32")
        base = {name: parameter.detach() for name, parameter in model.named_parameters()}
        checkpoints = {
            (checkpoint.incarnation, checkpoint.step): checkpoint for checkpoint in checkpoints_backwards(self.store)
        }

        def policy(checkpoint: Checkpoint) -> Tensors:
            return load_weights(self.store, checkpoint, {name: tensor.clone() for name, tensor in base.items()})

        def digest_of(checkpoint: Checkpoint) -> str:
            loaded = load_adapter(self.store, checkpoint)
            return digest(policy(checkpoint)) if loaded is None else fingerprint(loaded[1]).digest

        trained = {version: digest_of(checkpoint) for version, checkpoint in checkpoints.items()}
        config, first = attempt_config(latest_attempt(self.store)), digest(base)
        if config.sends_adapters:
            # No checkpoint holds the first adapter, which is drawn from the seed.
            dtypes = {"dtype": "float32", "generation_dtype": "float32"}
            trainer = load_trainer(Trainer, self._start_model, config.training, **dtypes, seed=config.seed)
            first = fingerprint(trainer.adapter()).digest
        return {(0, 0): first, **trained}

    def token_versions(self, generator: int) -> dict[int, set[Version]]:
        """The versions that the generator's tokens are tagged with, by epoch of its process."""
        versions: dict[int, set[Version]] = {}
        for row in read_rows(self.store, layout.trajectories(generator), TRAJECTORY):
            tagged = {(row["incarnation"], version) for version in row["span_versions"]}
            versions.setdefault(row["epoch"], set()).update(tagged)
        return versions

    def all_token_versions(self) -> set[Version]:
        return set().union(*(tagged for g in GENERATORS for tagged in self.token_versions(g).values()))

    def measured_versions(self, stage: str, replica: int, name: str) -> set[Version]:
        """Versions for which this stage's metrics have a row of this name."""
        rows = read_rows(self.store, layout.metrics(stage, replica), METRIC)
        return {(row["incarnation"], row["policy_version"]) for row in rows if row["name"] == name}

    def stored_kinds(self) -> set[str]:
        """How versions are stored: as `anchor`, `delta` or `adapter`."""
        records = iter(LogReader(self.store, layout.WEIGHTS).next, None)
        return {record.body["state"]["kind"] for record in records if record.kind == "checkpoint"}

    def _collect(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            for generator in GENERATORS:
                status = self.status("generate", generator)
                if "weights_digest" in status:
                    version, digest = (status["incarnation"], status["policy_version"]), status["weights_digest"]
                    seen = Acknowledged(
                        generator=generator, version=version, digest=digest, route=status["weights_route"]
                    )
                    self.acknowledged[seen] = None
