"""Campaigns that show how weights travel: two generators, a policy made in a second, an end that waits for everybody.

campaign ─► … ─► the last hand-over: the trainer stops ─► every generator holds that version ─► it goes on ─► ended

Without that stop a campaign may end while its last version is still on its way, which no one needs any more.
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
from support.campaigns import Ended, Millrace, stages_of, wait_until
from support.failpoints import Failpoints

from configs.schema import RunConfig
from millrace.bootstrap import TinyModel, bootstrap
from millrace.stages.inputs import load_prompt_set
from millrace.types import Sampling
from storage.factory import open_store
from storage.failpoints import FIRED, SPECS
from storage.progress import read_life

GENERATORS = (0, 1)
GROUPS_PER_STEP, GROUP_SIZE = 8, 4
_PROMPTS = {"arithmetic": {"digits": 1, "max_sum": 9}, "num_eval": 8}
_PATIENCE_SECONDS = 300.0
_LOOK_SECONDS = 0.02

Version = tuple[int, int]
"""Incarnation, policy version."""


def make_start_model(folder: Path) -> None:
    """Saves a policy that answers one sum in five, so that rewards differ and each step changes the weights."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {"training": {"max_steps": 1}, "prompts": _PROMPTS, "evaluation": {"num_prompts": _PROMPTS["num_eval"]}}
    )
    shape = TinyModel(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        slip_rate=0.3,
        target_fluency=1.0,
        max_accuracy=0.0,
        max_steps=30,
        batch_size=128,
        learning_rate=4e-3,
    )
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens)
    bootstrap(load_prompt_set(config).train, shape, folder, seed=0, sampling=sampling, report=lambda line: None)


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """What a generator said of the weights it works with."""

    generator: int
    version: Version
    digest: str
    route: str


class WeightCampaign:
    """A campaign of so many steps over `transport`, running while its `with` block lasts.

    `run_id` is one that no other campaign of the session has. `fired` is the folder of the failpoints' witnesses.
    `last_hand_over` says which hand-over of its last trainer process, after a step, is the last of all.
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
            "prompts.arithmetic.digits": _PROMPTS["arithmetic"]["digits"],
            "prompts.arithmetic.max_sum": _PROMPTS["arithmetic"]["max_sum"],
            "prompts.num_eval": _PROMPTS["num_eval"],
            "evaluation.num_prompts": _PROMPTS["num_eval"],
            "generation.replicas": len(GENERATORS),
            "generation.group_size": GROUP_SIZE,
            "generation.groups_per_batch": GROUPS_PER_STEP // len(GENERATORS),
            "training.groups_per_step": GROUPS_PER_STEP,
            "training.max_steps": steps,
            # So that the digest of every version can be looked up afterwards.
            "training.checkpoint_every": 1,
            "staleness.max_staleness": 8,
            "weights.transport": transport,
            # The trainer is stopped until the generators are where they should be.
            "supervision.hang_seconds": 2 * _PATIENCE_SECONDS,
            **settings,
        }
        self._seen: dict[Acknowledged, None] = {}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "WeightCampaign":
        environment = self.failpoints.environment()
        self._millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
        self._process = self._millrace.start(*self._millrace.campaign(self.run_id, **self._settings))
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watcher.join()
        # What a failed test left stopped would not notice that its controller is gone.
        for process in stages_of(self.run):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def life(self, stage: str, replica: int = 0) -> dict[str, Any]:
        """The sign of life of one process."""
        return read_life(self._store, stage, replica)

    def process(self, stage: str, replica: int = 0) -> psutil.Process:
        """One process of a stage, by what it said last."""
        return psutil.Process(self.life(stage, replica)["pid"])

    @property
    def trainer_version(self) -> int:
        """The trainer's policy version; −1 before it has one."""
        version: int = self.life("train").get("policy_version", -1)
        return version

    def ahead(self) -> int:
        """By how many rollouts generator 0 is ahead of generator 1."""
        made = [self.life("generate", generator).get("rollouts", 0) for generator in GENERATORS]
        return made[0] - made[1]

    def holds(self, generator: int) -> int:
        """The policy version of a generator, as it said last; −1 before it has one."""
        version: int = self.life("generate", generator).get("policy_version", -1)
        return version

    def trainer_stopped(self) -> bool:
        """Whether a failpoint has stopped the trainer."""
        try:
            return self.trainer_version >= 0 and self.process("train").status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            # Killed, and its successor has not said anything yet.
            return False

    @property
    def acknowledged(self) -> list[Acknowledged]:
        """What generators were seen to say, in order; some of it may have gone unseen."""
        return list(self._seen)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails with the campaign's output if it ends before."""

        def look() -> bool:
            assert self._process.poll() is None, f"while waiting for {what}: {self._process.communicate()[0]}"
            return condition()

        wait_until(look, what, _PATIENCE_SECONDS)

    def finish(self) -> Ended:
        """Lets the trainer go on once every generator holds the last version, and waits for the end."""
        self.wait_until(self.trainer_stopped, f"the trainer to stop behind version {self.steps}")
        self.wait_until(self._everybody_there, f"every generator to hold version {self.steps}")
        self.process("train").resume()
        output, _ = self._process.communicate(timeout=_PATIENCE_SECONDS)
        return Ended(self._process.returncode, output)

    def _everybody_there(self) -> bool:
        return all(self.holds(generator) == self.steps for generator in GENERATORS)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            for generator in GENERATORS:
                life = self.life("generate", generator)
                if "weights_digest" in life:
                    seen = Acknowledged(
                        generator=generator,
                        version=(life["incarnation"], life["policy_version"]),
                        digest=life["weights_digest"],
                        route=life["weights_route"],
                    )
                    self._seen.setdefault(seen)
