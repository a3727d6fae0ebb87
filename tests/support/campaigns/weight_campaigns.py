"""Campaigns that test weight sync: two generators, a tiny policy, and an end that waits for every generator.

campaign ─► … ─► last hand-over: the trainer stops ─► every generator holds that version ─► it continues ─► ended

Without that stop, a campaign may end before the generators have received its last version.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from support.campaigns.campaigns import Ended, Millrace, stages_of, wait_until
from support.stages.failpoints import Failpoints

from configs.recipe import Recipe
from configs.schema import RunConfig
from millrace.bootstrap.tiny_model import bootstrap
from millrace.prompts.dataset import load_prompts
from storage.checkpoints import read_latest
from storage.failpoints import FIRED, SPECS
from storage.progress import read_status
from storage.stores.factory import open_store

GENERATORS = (0, 1)
GROUPS_PER_STEP, GROUP_SIZE = 8, 4
_PROMPTS = {"digits": 1, "num_eval": 8}
_PATIENCE_SECONDS = 300.0
_LOOK_SECONDS = 0.02

Version = tuple[int, int]
"""Incarnation, policy version."""


def make_start_model(folder: Path) -> None:
    """Saves a policy that answers one sum in five, so that rewards differ and each step changes the weights."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate({"training": {"max_steps": 1}, "prompts": _PROMPTS})
    shape = Recipe(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        error_rate=0.3,
        target_imitation_rate=1.0,
        max_accuracy=0.0,
        max_steps=30,
        batch_size=128,
        learning_rate=4e-3,
    )
    prompts, longest = load_prompts(config.prompts).train, config.generation.max_new_tokens
    bootstrap(prompts, shape, folder, seed=0, max_new_tokens=longest, report=lambda step, line: None)


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
    `last_hand_over`: number of hand-overs after a step that the last trainer process makes.
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
        last_hand_over: int,
        **settings: object,
    ) -> None:
        self.run_id = run_id
        self.run = millrace.root / run_id
        self.steps = steps
        self.start_model = start_model
        self.failpoints = Failpoints(fired, *failpoints, f"train-0 train.after_handover {last_hand_over} stop")
        self._store = open_store(str(self.run))
        self._millrace = millrace
        self._settings = {
            "model.path": str(start_model),
            "prompts.digits": _PROMPTS["digits"],
            "prompts.num_eval": _PROMPTS["num_eval"],
            "generation.replicas": len(GENERATORS),
            "generation.group_size": GROUP_SIZE,
            "generation.groups_per_batch": GROUPS_PER_STEP // len(GENERATORS),
            "training.groups_per_step": GROUPS_PER_STEP,
            "training.max_steps": steps,
            # Keeps the digest of every version for comparison.
            "training.checkpoint_every": 1,
            "staleness.max_staleness": 8,
            "weights.transport": transport,
            # The trainer stays stopped until the generators have caught up.
            "supervision.hang_seconds": 2 * _PATIENCE_SECONDS,
            **settings,
        }
        self._seen: dict[Acknowledged, None] = {}
        self._over = threading.Event()
        self._monitor = threading.Thread(target=self._collect, daemon=True)

    def __enter__(self) -> "WeightCampaign":
        environment = self.failpoints.environment()
        self._millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
        self._process = self._millrace.start(*self._millrace.campaign(self.run_id, **self._settings))
        self._monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._monitor.join()
        # A process that a failed test left stopped would not notice that its controller has died.
        for process in stages_of(self.run):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def status(self, stage: str, replica: int = 0) -> dict[str, Any]:
        """The status record of one process."""
        return read_status(self._store, stage, replica)

    def process(self, stage: str, replica: int = 0) -> psutil.Process:
        """One process of a stage, by its status record."""
        return psutil.Process(self.status(stage, replica)["pid"])

    @property
    def trainer_version(self) -> int:
        """The trainer's policy version; −1 before it has one."""
        version: int = self.status("train").get("policy_version", -1)
        return version

    def ahead(self) -> int:
        """By how many trajectories generator 0 is ahead of generator 1."""
        made = [self.status("generate", generator).get("rollouts", 0) for generator in GENERATORS]
        return made[0] - made[1]

    def holds(self, generator: int) -> int:
        """A generator's policy version; −1 before it has one."""
        version: int = self.status("generate", generator).get("policy_version", -1)
        return version

    def checkpointed(self) -> int:
        """The version of the newest checkpoint; −1 before there is one."""
        newest = read_latest(self._store)
        return -1 if newest is None else newest.step

    def trainer_stopped(self) -> bool:
        """Whether a failpoint has stopped the trainer."""
        try:
            return self.trainer_version >= 0 and self.process("train").status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            # Killed, and the next process has no status record yet.
            return False

    @property
    def acknowledged(self) -> list[Acknowledged]:
        """The reports that were seen, in order. Some may have been missed."""
        return list(self._seen)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails with the campaign's output if it ends before that."""

        def look() -> bool:
            assert self._process.poll() is None, f"while waiting for {what}: {self._process.communicate()[0]}"
            return condition()

        wait_until(look, what, _PATIENCE_SECONDS)

    def finish(self) -> Ended:
        """Resumes the trainer once every generator holds the last version, and waits for the end."""
        self.wait_until(self.trainer_stopped, f"the trainer to stop behind version {self.steps}")
        self.wait_until(self._all_hold_last_version, f"every generator to hold version {self.steps}")
        self.process("train").resume()
        output, _ = self._process.communicate(timeout=_PATIENCE_SECONDS)
        return Ended(self._process.returncode, output)

    def _all_hold_last_version(self) -> bool:
        return all(self.holds(generator) == self.steps for generator in GENERATORS)

    def _collect(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            for generator in GENERATORS:
                status = self.status("generate", generator)
                if "weights_digest" in status:
                    seen = Acknowledged(
                        generator=generator,
                        version=(status["incarnation"], status["policy_version"]),
                        digest=status["weights_digest"],
                        route=status["weights_route"],
                    )
                    self._seen.setdefault(seen)
