"""The product's own stages in one process and in virtual time: only what they compute with is given.

    Generator + Admission + CarryOver ─► ║ trajectories ║ ─► score.main ─► ║ scores ║ ─► TrainLoop ─► WeightSyncLoop ─┐
            ▲ engine: Costs.decode …                        Costs.score              Costs.train …       Costs.push   │
            └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Each stage has a thread and the clock lets one run at a time. What a stage computes takes the time of a cost model,
however long the computation takes. Every stage that waits looks again whenever something was written that decides
anything, and status records are always up to date: in a real run both are late by up to 0.25 s.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.virtual_time.clock import VirtualClock, in_virtual_time
from benchmarks.virtual_time.ends import Mailbox, Pushes, SilentStage, TimedHandover
from benchmarks.virtual_time.watched_store import WatchedStore
from configs.schema import RunConfig
from millrace.chat.encoder import PromptEncoder
from millrace.generation.engines.base import Engine
from millrace.models.decoder import Decoder
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.outcome import Admitted
from millrace.rewards.base import Reward
from millrace.rewards.isolation.messages import TimedScore
from millrace.rewards.scorer import Pairs, Scorer
from millrace.rollouts import consumed
from millrace.rollouts.groups_in_flight import GroupsInFlight
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runs.record import create_run
from millrace.runtime import metrics
from millrace.runtime import stage as stage_module
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.stage import Stage
from millrace.stages import generate_loop, score
from millrace.stages.admission import Admission, prompt_order
from millrace.stages.carry_over import CarryOver
from millrace.stages.generate_loop import Generator
from millrace.stages.sync_weights import WeightSyncLoop
from millrace.stages.train_loop import TrainLoop
from millrace.stages.train_state import open_train_state
from millrace.training.batch import Sample
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from millrace.types import Prompt, Request, Sampling, Trajectory
from millrace.weights.fallback import FallbackReceiver
from storage.stores.base import Store


class TimedEngine(Engine):
    """An engine whose tokens take virtual time. Like one in a process of its own, it goes on beside the stage."""

    @abstractmethod
    def stand_still(self, seconds: float) -> None:
        """Lets this time pass without a token."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run computes with, and how long that takes. What is called here takes no time by itself."""

    clock: VirtualClock
    costs: Callable[[], Costs]
    """Those in force now."""
    prompts: Sequence[Prompt]
    encoder: PromptEncoder
    probed: tuple[int, ...]
    """Token ids, as in `TrainLoop`."""
    engine: Callable[[], TimedEngine]
    reward: Reward
    """Not isolated: it scores in this process."""
    decode: Decoder
    trainer: Trainer
    after_step: Callable[[], None] = lambda: None
    """Called when a step has ended, before its version is handed over."""


def run(config: RunConfig, parts: Parts, store: Store) -> list[Admitted]:
    """A run from its start to `training.max_steps`, stored in `store`; returns its groups in the order of admission."""
    assert parts.costs().cores is None, "no stage slows another one down"
    stages = _Stages(config, parts, WatchedStore(parts.clock, store))
    with in_virtual_time(parts.clock, ("millrace", "storage", "benchmarks")), _patched(parts):
        create_run(store, "virtual", config.model_dump(mode="json"))
        parts.clock.run(stages.mains())
    return stages.admitted


class _TimedWriter(TrajectoryWriter):
    """Makes rows of responses, while the engine stands still."""

    engine: TimedEngine
    costs: Callable[[], Costs]

    def append(self, trajectories: Sequence[Trajectory]) -> int:
        self.engine.stand_still(self.costs().rollout * len(trajectories))
        return super().append(trajectories)


class _TimedScorer(Scorer):
    """Scores the responses of a part one after the other."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.reward)
        self._clock, self._costs = parts.clock, parts.costs

    def score_many(self, pairs: Pairs, each: Callable[[], None] = lambda: None) -> list[TimedScore]:
        costs = self._costs()
        self._clock.sleep(costs.score_part)
        for _ in pairs:
            self._clock.sleep(costs.score)
        return super().score_many(pairs, each)


class _TracedGroups(GroupsInFlight):
    """Tells what was admitted."""

    def __init__(self, group_size: int, run_seed: int, tell: Callable[[int, int], None]) -> None:
        super().__init__(group_size, run_seed)
        self._tell = tell

    def admit(self, group_id: int, *args: Any, **kwargs: Any) -> list[Request]:
        self._tell(group_id, args[2])
        return super().admit(group_id, *args, **kwargs)


@contextmanager
def _patched(parts: Parts) -> Iterator[None]:
    """Inside the block the score stage has the given reward, and status records are written at every chance."""
    with (
        patch.object(score, "make_scorer", lambda *_: _TimedScorer(parts)),
        patch.object(score, "load_decoder", lambda _: parts.decode),
        patch.object(score, "start_folder", lambda *_: None),
        patch.object(stage_module, "_PROGRESS_SECONDS", 0.0),
        patch.object(generate_loop, "_SHOW_SECONDS", 0.0),
        # Nobody reads these two while the run goes on.
        patch.object(metrics, "_SECONDS", math.inf),
        patch.object(consumed, "_SECONDS", math.inf),
    ):
        yield


class _Stages:
    """The stages above, and what they admitted."""

    def __init__(self, config: RunConfig, parts: Parts, store: Store) -> None:
        self.admitted: list[Admitted] = []
        self._config = config
        self._parts = parts
        self._clock = parts.clock
        self._store = store
        self._handed_over, self._arrived = Mailbox(self._clock), Mailbox(self._clock)
        self._stages: list[Stage] = []

    def mains(self) -> list[tuple[str, Callable[[], None]]]:
        """Those that hand something on come before those that take it, for what happens at the same time."""
        generation, scoring = self._config.generation, self._config.scoring
        return [
            self._stage("sync_weights", 0, self._sync_weights),
            *(self._stage("generate", g, self._generate) for g in range(generation.replicas)),
            *(self._stage("score", s, score.main) for s in range(scoring.replicas)),
            self._stage("train", 0, self._train),
        ]

    def _stage(self, name: str, replica: int, main: Callable[[Stage], None]) -> tuple[str, Callable[[], None]]:
        def live() -> None:
            arguments = StageArguments(run_url=self._store.url, attempt=0, replica=replica, handover=Path("/nowhere"))
            stage = SilentStage(name=name, arguments=arguments, config=self._config, store=self._store)
            self._stages.append(stage)
            main(stage)
            stage.close()

        return f"{name}-{replica}", live

    def _generate(self, stage: Stage) -> None:
        generation, parts = self._config.generation, self._parts
        engine = parts.engine()
        writer = _TimedWriter(
            self._store,
            stage.replica,
            Sampling(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=generation.top_k,
                max_new_tokens=generation.max_new_tokens,
            ),
            self._config.storage,
            vocab_size=engine.vocab_size,
            group_size=generation.group_size,
            num_generators=generation.replicas,
        )
        writer.engine, writer.costs = engine, parts.costs
        admission = Admission(stage, prompt_order(stage, parts.prompts), parts.encoder)
        admission.groups = _TracedGroups(
            generation.group_size,
            self._config.seed,
            lambda group_id, version: self.admitted.append(
                Admitted(t=self._clock.now, group_id=group_id, generator=stage.replica, policy_version=version)
            ),
        )
        reader = FallbackReceiver(self._arrived, None, route="mailbox", clock=self._clock.time)
        turns = DeviceTurns(stage, Device(), engine)
        with writer:
            carry_over = CarryOver(stage, engine, admission, writer)
            Generator(stage, engine, turns, admission, reader, writer, carry_over).run()

    def _train(self, stage: Stage) -> None:
        parts, trainer = self._parts, self._parts.trainer
        with open_train_state(stage, trainer) as state:
            handover = TimedHandover(self._clock, parts.costs, trainer, self._handed_over)
            turns = DeviceTurns(stage, Device(), trainer)
            timed_state: Any = state
            timed_state.measure = self._after(lambda: parts.costs().overhead, state.measure)
            timed_trainer: Any = trainer
            timed_trainer.step = self._timed(trainer.step)
            TrainLoop(state, turns, handover, parts.probed, self._config.training.max_steps).run()
        for each in self._stages:
            each.draining = True
        self._clock.changed()

    def _after(self, seconds: Callable[[], float], do: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._clock.sleep(seconds())
            return do(*args, **kwargs)

        return timed

    def _timed(self, step: Callable[..., StepReport]) -> Callable[..., StepReport]:
        def timed(samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
            # Prompts are shared: the config's default.
            prompts = {sample.group: len(sample.prompt_tokens) for sample in samples}
            tokens = sum(prompts.values()) + sum(len(sample.response_tokens) for sample in samples)
            self._clock.sleep(self._parts.costs().train(tokens, len(samples)))
            report = step(samples, rate_factor)
            self._parts.after_step()
            return report

        return timed

    def _sync_weights(self, stage: Stage) -> None:
        pushes = Pushes(self._clock, self._parts.costs, self._arrived)
        WeightSyncLoop(stage, self._handed_over, pushes, None, clock=self._clock.time).run()
