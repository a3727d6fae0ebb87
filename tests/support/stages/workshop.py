"""A generator's loop run step by step, with a scripted engine and transport."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from configs.generation import GenerationConfig
from configs.operation import StorageConfig
from configs.schema import RunConfig
from configs.task import EnvironmentConfig, PromptsConfig
from configs.training import TrainingConfig
from millrace.chat.encoder import PromptEncoder
from millrace.errors import WeightsCorrupt
from millrace.generation.engines.base import Engine
from millrace.generation.environments.episodes import sampling_of
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.stage import Stage
from millrace.stages.admission import Admission, prompt_order
from millrace.stages.carry_over import CarryOver
from millrace.stages.generate_loop import Generator
from millrace.types import FinishReason, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Manifest, Probe, Weights, WeightsId, WeightsReceiver
from millrace.weights.fallback import FallbackReceiver
from millrace.weights.fingerprint import fingerprint
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader

CONFIG = RunConfig(
    prompts=PromptsConfig(shuffle=False),
    training=TrainingConfig(max_steps=1, groups_per_step=4),
    generation=GenerationConfig(group_size=2, groups_per_batch=3),
    environment=EnvironmentConfig(name="calculator"),
    storage=StorageConfig(commit_max_ms=0),
)
TENSORS = {"w": torch.zeros(3)}
SAID = {3: -0.5, 4: -1.5}
"""The engine's next log-probabilities, nats."""


def weights(version: int, incarnation: int = 0, probe: Probe | None = None) -> Weights:
    weights_id = WeightsId(incarnation=incarnation, policy_version=version, t_offered=time.time())
    manifest = Manifest(id=weights_id, probe=probe, fingerprint=fingerprint(TENSORS))
    return Weights(manifest=manifest, tensors=TENSORS)


class HeardStage(Stage):
    """Records its milestones."""

    def log(self, line: str) -> None:
        heard: list[str] = self.__dict__.setdefault("heard", [])
        heard.append(line)


class Mailbox(WeightsReceiver):
    """Hands out its content once; the second look asks the stage to drain."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.inside: Weights | WeightsCorrupt | None = None
        self.looks = 0

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        self.looks += 1
        self.stage.draining = self.looks > 1
        result, self.inside = self.inside, None
        if isinstance(result, WeightsCorrupt):
            raise result
        return result

    def close(self) -> None:
        """Nothing is open."""


class HurriedDevice(Device):
    """A generator's; a stage that finds it taken is asked to drain."""

    def __init__(self, stage: Stage, file: Path) -> None:
        super().__init__(file, alone=False)
        self.stage = stage

    def take(self) -> bool:
        self.stage.draining |= not super().take()
        return self.held


class ObedientEngine(Engine):
    """Finishes the groups in `finish`; a response has one token of each version that it was in flight under."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.policy_version = 0
        self.vocab_size = 16
        self.requests: list[tuple[Request, list[int]]] = []
        self.finish: Collection[int] = ()
        self.environment_error: str | None = None
        self.samples = True
        self.awake = True

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        assert self.awake
        self.requests += [(request, [self.policy_version]) for request in requests]

    def collect(self, seconds: float) -> list[Trajectory]:
        # One turn is enough: draining does not wait for requests in flight.
        self.stage.draining = True
        done = [entry for entry in self.requests if entry[0].group_id in self.finish]
        self.requests = [entry for entry in self.requests if entry[0].group_id not in self.finish]
        return [answer(request, versions, self.environment_error) for request, versions in done]

    @property
    def tokens_in_flight(self) -> int:
        return sum(len(versions) for _, versions in self.requests)

    def interrupt(self) -> list[Trajectory]:
        requests, self.requests = self.requests, []
        return [answer(request, versions, finish_reason="unfinished") for request, versions in requests]

    def update_weights(self, weights: Weights) -> float:
        assert self.awake
        self.policy_version = weights.id.policy_version
        for _, versions in self.requests if self.samples else ():
            versions.append(self.policy_version)
        return 0.25

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        assert self.awake
        return SAID

    def sleep(self) -> None:
        assert self.awake
        assert self.in_flight == 0
        self.awake = False

    def wake(self) -> None:
        assert not self.awake
        self.awake = True

    def close(self) -> None:
        """Nothing is open."""


def answer(
    request: Request,
    versions: list[int],
    environment_error: str | None = None,
    finish_reason: FinishReason = "length",
) -> Trajectory:
    """A response with one token of each version."""
    response = Response(
        tokens=(3,) * len(versions),
        rollout_logprobs=(-1.0,) * len(versions),
        version_spans=tuple((version, start) for start, version in enumerate(versions)),
        finish_reason=finish_reason,
        environment_error=environment_error,
    )
    return Trajectory(request=request, response=response, t_started=1.0, t_finished=2.0)


class Workshop:
    """A generator with everything around it, run step by step; `shared`: the file of its shared device."""

    def __init__(
        self,
        store: MemoryStore,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig = CONFIG,
        *,
        replica: int = 0,
        shared: Path | None = None,
    ) -> None:
        arguments = StageArguments(run_url=store.url, attempt=0, replica=replica, handover=Path("/nowhere"))
        self.store = store
        self.stage = HeardStage(name="generate", arguments=arguments, config=config, store=store)
        self.engine = ObedientEngine(self.stage)
        self.mailbox = Mailbox(self.stage)
        writer = TrajectoryWriter(
            store,
            replica,
            {name: sampling_of(source.generation) for name, source in config.by_source().items()},
            config.storage,
            vocab_size=16,
            group_size=0 if config.sources else config.generation.group_size,
            num_generators=config.generation.replicas,
        )
        prompts = [Prompt(prompt_id=f"p{i}", text=f"{i}+1=", answer="", source="test") for i in range(9)]
        order = prompt_order(self.stage, dict.fromkeys(config.by_source(), prompts))
        reader = FallbackReceiver(self.mailbox, None, route="shm")
        self.device = Device() if shared is None else HurriedDevice(self.stage, shared)
        # A generator that shares its device has taken it before it made its engine.
        self.device.take()
        turns = DeviceTurns(self.stage, self.device, self.engine)
        encoders = {name: PromptEncoder(tokenizer, source.prompts) for name, source in config.by_source().items()}
        admission = Admission(self.stage, order, encoders)
        self.carry_over = CarryOver(self.stage, self.engine, admission, writer)
        self.generator = Generator(self.stage, self.engine, turns, admission, reader, writer, self.carry_over)

    @property
    def heard(self) -> list[str]:
        return self.stage.__dict__.get("heard", [])

    @property
    def in_flight(self) -> set[int]:
        """Numbers of the groups in flight."""
        return {request.group_id for request, _ in self.engine.requests}

    def turn(self, finish: Collection[int], new: Weights | WeightsCorrupt | None = None) -> None:
        """One turn of the loop: `new` is in the mailbox, and the groups `finish` are finished."""
        self.engine.finish, self.mailbox.looks = finish, 0
        if new is not None:
            self.mailbox.inside = new
        self.stage.draining = False
        self.generator.run()

    def committed(self) -> list[tuple[list[int], int]]:
        """(groups, newest version in the record) of each part."""
        reader, parts = StreamReader(self.store, layout.trajectories(self.stage.replica), TRAJECTORY), []
        while (part := reader.next()) is not None:
            groups = list(dict.fromkeys(part.table["group_id"].to_pylist()))
            parts.append((groups, part.record.max_policy_version))
        return parts
