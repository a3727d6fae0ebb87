"""Generators and a trainer, driven by hand, that share a device; each may be killed at any moment."""

import gc
from pathlib import Path

from support.stages.workshop import HeardStage, Workshop, weights
from transformers import PreTrainedTokenizerBase

from configs.generation import GenerationConfig
from configs.operation import PlacementConfig
from configs.schema import PipelineConfig, RunConfig
from configs.training import TrainingConfig
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader

GROUPS_PER_STEP = 4
ALL = range(10_000)
"""More groups than any test makes."""


def colocated_config(replicas: int) -> RunConfig:
    return RunConfig(
        pipeline=PipelineConfig(mode="sync"),
        training=TrainingConfig(max_steps=1, groups_per_step=GROUPS_PER_STEP),
        generation=GenerationConfig(group_size=2, groups_per_batch=3, replicas=replicas),
        placement=PlacementConfig(colocated=True),
    )


class TrainerByHand:
    """Counts the groups that are committed and steps on as many as it takes; it knows no weights.

    While `awake`, it holds the device.
    """

    def __init__(self, store: MemoryStore, file: Path, replicas: int, policy_version: int = 0) -> None:
        arguments = StageArguments(run_url=store.url, attempt=0, replica=0, handover=Path("/nowhere"))
        self.stage = HeardStage(name="train", arguments=arguments, config=colocated_config(replicas), store=store)
        self.policy_version = policy_version
        self.awake = True
        self.to_drop = 0
        self.groups_dropped = 0
        self.groups = 0
        self.device = Device(file, alone=True)
        self.turns = DeviceTurns(self.stage, self.device, self)
        self.readers = [StreamReader(store, layout.trajectories(g), TRAJECTORY) for g in range(replicas)]

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    def collect(self) -> bool:
        """Whether a step's worth is there; `to_drop` of the new groups are dropped."""
        for reader in self.readers:
            while (part := reader.next()) is not None:
                self.groups += len(set(part.table["group_id"].to_pylist()))
        dropped = min(self.to_drop, self.groups)
        self.to_drop -= dropped
        self.groups -= dropped
        self.groups_dropped += dropped
        self.stage.update_status(now=True, groups_dropped=self.groups_dropped)
        return self.groups >= GROUPS_PER_STEP


class Colocated:
    """A run of `replicas` generators and a trainer on one device, with no process started yet."""

    def __init__(self, store: MemoryStore, tokenizer: PreTrainedTokenizerBase, folder: Path, replicas: int) -> None:
        self.store = store
        self.tokenizer = tokenizer
        self.file = folder / "device"
        self.replicas = replicas
        self.generators: list[Workshop | None] = [None] * replicas
        self.trainer: TrainerByHand | None = None
        # Policy version, groups taken, groups dropped: the content of a checkpoint.
        self.saved = (0, 0, 0)
        self.offered: int | None = None

    @property
    def policy_version(self) -> int:
        return self.saved[0]

    def generate(self, replica: int, *, finish: bool) -> None:
        """A turn of this generator; a dead one is started first, unless the trainer holds the device."""
        workshop = self.generators[replica]
        if workshop is None:
            if not Device(self.file, alone=False).take():
                return
            config = colocated_config(self.replicas)
            workshop = Workshop(self.store, self.tokenizer, config, replica=replica, shared=self.file)
            self.generators[replica] = workshop
        held = workshop.generator.weights
        new = self.offered is not None and (held is None or held.policy_version < self.offered)
        waits = workshop.generator.arrived is not None
        workshop.turn(ALL if finish else (), new=weights(self.offered or 0) if new and not waits else None)
        self.check()

    def train(self) -> None:
        """A turn of the trainer; a dead one is started first, if the device is free."""
        trainer = self.trainer
        if trainer is None:
            trainer = TrainerByHand(self.store, self.file, self.replicas, self.policy_version)
            if not trainer.device.take():
                return
            self.trainer = trainer
            self._restore(trainer)
            self.check()
            self._hand_over(trainer)
        elif trainer.awake:
            trainer.policy_version += 1
            trainer.groups -= GROUPS_PER_STEP
            self._hand_over(trainer)
        elif trainer.collect():
            # Its step ends with the next look: it may be killed before.
            trainer.turns.begin()
        self.check()

    def kill_generator(self, replica: int) -> None:
        self.generators[replica] = None
        gc.collect()

    def kill_trainer(self) -> None:
        self.trainer = None
        gc.collect()

    def check(self) -> None:
        """That the trainer has the device to itself while it is awake."""
        if self.trainer is not None and self.trainer.awake:
            assert not any(workshop.engine.awake for workshop in self.generators if workshop is not None)

    def _restore(self, trainer: TrainerByHand) -> None:
        _, taken, dropped = self.saved
        while trainer.groups < taken + dropped and trainer.collect():
            pass
        trainer.collect()
        trainer.groups -= taken + dropped
        trainer.groups_dropped = dropped
        trainer.stage.update_status(now=True, groups_dropped=dropped)

    def _hand_over(self, trainer: TrainerByHand) -> None:
        taken = trainer.policy_version * GROUPS_PER_STEP
        self.saved = (trainer.policy_version, taken, trainer.groups_dropped)
        self.offered = trainer.policy_version
        trainer.turns.end()
