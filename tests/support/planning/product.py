"""The product's own stages in one process and in virtual time: only the durations are scripted.

    Generator + Admission + CarryOver ─► ║ trajectories ║ ─► score.main ─► ║ scores ║ ─► TrainLoop ─► WeightSyncLoop ─┐
            ▲ engine: Costs.decode …                        Costs.score              Costs.train …       Costs.push   │
            └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Each stage has a thread and the clock lets one run at a time. Every stage that waits looks again whenever something was
written that decides anything, and status records are always up to date: in a real run both are late by up to 0.25 s.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.planning.timed_engine import VOCAB_SIZE, TimedEngine
from support.planning.timed_stages import Mailbox, Pushes, SilentStage, TimedHandover, TimedTrainer, WatchedStore
from support.planning.virtual_clock import VirtualClock, in_virtual_time

from benchmarks.sleeping.score import SleepingReward
from configs.schema import RunConfig
from millrace.chat.encoder import Encoded
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths
from millrace.planning.simulation.outcome import Admitted, Trace, Trained
from millrace.rewards.base import Reward
from millrace.rewards.isolation.messages import TimedScore
from millrace.rewards.scorer import Pairs, Scorer
from millrace.rollouts import consumed
from millrace.rollouts.consumed import TRAINED, read_consumed
from millrace.rollouts.groups_in_flight import GroupsInFlight
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runtime import metrics
from millrace.runtime import stage as stage_module
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.stage import Stage
from millrace.stages import generate_loop, score
from millrace.stages.admission import Admission, prompt_order
from millrace.stages.carry_over import CarryOver
from millrace.stages.sync_weights import WeightSyncLoop
from millrace.stages.train_loop import TrainLoop
from millrace.stages.train_state import open_train_state
from millrace.types import Prompt, Request, Sampling, Trajectory
from millrace.weights.fallback import FallbackReader

_PROMPTS = [Prompt(prompt_id="p", text="", answer="", source="test")]


def run_product(config: RunConfig, costs: Costs, lengths: Lengths) -> Trace:
    """A run from its start to `training.max_steps`: its groups in the order of admission, and its steps."""
    clock = VirtualClock()
    run = _Run(config, costs, lengths, clock)
    with in_virtual_time(clock, ("millrace", "storage", "benchmarks")), run.patched():
        clock.run(run.stages())
    return run.trace()


class _TimedWriter(TrajectoryWriter):
    """Makes rows of responses, while the engine stands still."""

    engine: TimedEngine
    seconds: float
    """For each response."""

    def append(self, trajectories: Sequence[Trajectory]) -> int:
        self.engine.stand_still(self.seconds * len(trajectories))
        return super().append(trajectories)


class _TimedScorer(Scorer):
    """Takes so many seconds for each part, besides those of the reward."""

    def __init__(self, reward: Reward, clock: VirtualClock, seconds: float) -> None:
        super().__init__(reward)
        self._clock = clock
        self._seconds = seconds

    def score_many(self, pairs: Pairs, each: Callable[[], None] = lambda: None) -> list[TimedScore]:
        self._clock.sleep(self._seconds)
        return super().score_many(pairs, each)


class _TracedGroups(GroupsInFlight):
    """Tells what was admitted."""

    def __init__(self, group_size: int, run_seed: int, tell: Callable[[int, int], None]) -> None:
        super().__init__(group_size, run_seed)
        self._tell = tell

    def admit(self, group_id: int, *args: Any, **kwargs: Any) -> list[Request]:
        self._tell(group_id, args[2])
        return super().admit(group_id, *args, **kwargs)


class _ConstantPrompts:
    """An encoder of prompts that are all as long as the first one of `lengths`."""

    def __init__(self, lengths: Lengths) -> None:
        self._prompt_tokens, _ = lengths.of_group(0)

    def encode(self, prompt: Prompt) -> Encoded:
        return Encoded((0,) * self._prompt_tokens)


class _Run:
    """The stages above, and what they did."""

    def __init__(self, config: RunConfig, costs: Costs, lengths: Lengths, clock: VirtualClock) -> None:
        assert costs.cores is None, "no stage slows another one down"
        self._config = config
        self._costs = costs
        self._lengths = lengths
        self._clock = clock
        self._store = WatchedStore(clock)
        self._handed_over, self._arrived = Mailbox(clock), Mailbox(clock)
        self._admitted: list[Admitted] = []
        self._trainer = TimedTrainer(clock, costs)
        self._stages: list[Stage] = []

    def stages(self) -> list[tuple[str, Callable[[], None]]]:
        """Those that hand something on come before those that take it, for what happens at the same time."""
        generation, scoring = self._config.generation, self._config.scoring
        return [
            self._stage("sync_weights", 0, self._sync_weights),
            *(self._stage("generate", g, self._generate) for g in range(generation.replicas)),
            *(self._stage("score", s, score.main) for s in range(scoring.replicas)),
            self._stage("train", 0, self._train),
        ]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Inside the block the score stage has a scripted reward, and status records are written at every chance."""
        costs = self._costs
        scorer = partial(_TimedScorer, SleepingReward(costs.score), self._clock, costs.score_part)
        with (
            patch.object(
                score,
                "make_scorer",
                lambda *_: scorer(),
            ),
            patch.object(score, "load_decoder", lambda _: lambda answers: [""] * len(answers)),
            patch.object(score, "start_folder", lambda *_: None),
            patch.object(stage_module, "_PROGRESS_SECONDS", 0.0),
            patch.object(generate_loop, "_SHOW_SECONDS", 0.0),
            # Nobody reads these two while the run goes on.
            patch.object(metrics, "_SECONDS", math.inf),
            patch.object(consumed, "_SECONDS", math.inf),
        ):
            yield

    def trace(self) -> Trace:
        """What was admitted before the last step ended, and the steps as they were stored."""
        rows = read_consumed(self._store).to_pylist()
        trained = [_step(list(of_step)) for _, of_step in groupby(rows, key=lambda row: row["policy_version"])]
        return Trace(admitted=[one for one in self._admitted if one.t < trained[-1].t], trained=trained)

    def _stage(self, name: str, replica: int, main: Callable[[Stage], None]) -> tuple[str, Callable[[], None]]:
        def live() -> None:
            arguments = StageArguments(run_url="dict://", attempt=0, replica=replica, handover=Path("/nowhere"))
            stage = SilentStage(name=name, arguments=arguments, config=self._config, store=self._store)
            self._stages.append(stage)
            main(stage)
            stage.close()

        return f"{name}-{replica}", live

    def _generate(self, stage: Stage) -> None:
        config = self._config
        engine = TimedEngine(self._clock, self._costs, lambda group, member: self._lengths.of_group(group)[1][member])
        writer = _TimedWriter(
            self._store,
            stage.replica,
            Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens),
            config.storage,
            vocab_size=VOCAB_SIZE,
            group_size=config.generation.group_size,
            num_generators=config.generation.replicas,
        )
        writer.engine, writer.seconds = engine, self._costs.rollout
        encoder: Any = _ConstantPrompts(self._lengths)
        admission = Admission(stage, prompt_order(stage, _PROMPTS), encoder)
        admission.groups = _TracedGroups(
            config.generation.group_size,
            config.seed,
            lambda group_id, version: self._admitted.append(
                Admitted(t=self._clock.now, group_id=group_id, generator=stage.replica, policy_version=version)
            ),
        )
        reader = FallbackReader(self._arrived, None, route="mailbox", clock=self._clock.time)
        turns = DeviceTurns(stage, Device(), engine)
        with writer:
            carry_over = CarryOver(stage, engine, admission, writer)
            generate_loop.Generator(stage, engine, turns, admission, reader, writer, carry_over).run()

    def _train(self, stage: Stage) -> None:
        trainer: Any = self._trainer
        with open_train_state(stage, trainer) as state:
            handover = TimedHandover(self._clock, self._costs, self._handed_over)
            turns = DeviceTurns(stage, Device(), trainer)
            patched: Any = state
            patched.measure = self._after(self._costs.overhead, state.measure)
            TrainLoop(state, turns, handover, (0,), self._config.training.max_steps).run()
        for each in self._stages:
            each.draining = True
        self._clock.changed()

    def _after(self, seconds: float, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._clock.sleep(seconds)
            return do(*args, **kwargs)

        return timed

    def _sync_weights(self, stage: Stage) -> None:
        pushes = Pushes(self._clock, self._costs, self._arrived)
        WeightSyncLoop(stage, self._handed_over, pushes, None, clock=self._clock.time).run()


def _step(rows: Sequence[dict[str, Any]]) -> Trained:
    trained = {row["group_id"] for row in rows if row["outcome"] == TRAINED}
    dropped = dict.fromkeys(row["group_id"] for row in rows if row["group_id"] not in trained)
    return Trained(
        t=rows[0]["t"], policy_version=rows[0]["policy_version"], groups=tuple(sorted(trained)), dropped=tuple(dropped)
    )
