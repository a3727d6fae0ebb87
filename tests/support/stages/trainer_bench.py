"""A trainer's loop on trajectories that a test commits itself, as far as they go: then it drains instead of waiting.

    bench.commit(0, [[0, 0, 2], [2]]) ─► ║ trajectories ║ + ║ scores ║ ─► bench.train() ─► ║ consumed ║, checkpoint
    bench.later(lambda: …)        what happens once the trainer waits
    bench.train() again           another trainer, from the checkpoint

One generator, one scorer, groups of any size; the model is tiny.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from support.replay.trained_run import score_rows

from configs.schema import RunConfig
from configs.stored import DEFAULT_SOURCE
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.group_sequence import GroupSet
from millrace.rollouts.ledger import Account
from millrace.runs.record import create_run
from millrace.runtime.arguments import StageArguments
from millrace.runtime.device_sharing import Device, DeviceTurns
from millrace.runtime.messages import EventKind
from millrace.runtime.stage import Stage
from millrace.stages.train.handover import Handover
from millrace.stages.train.train_loop import TrainLoop
from millrace.stages.train.train_state import open_train_state
from millrace.training.trainer import Trainer
from millrace.types import FinishReason, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import HandoverSender, Weights
from storage import layout
from storage.checkpoints import read_latest
from storage.progress import read_status, write_progress
from storage.schema import CONSUMED, METRIC, SCORE, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader, StreamWriter


class HurriedStage(Stage):
    """Where it would wait, the next thing of its script happens; at the end of the script it drains.

    Records the reasons of waits that ended in a drain, its events and its milestones.
    """

    def wait(self, until: Callable[[], bool], *, why: str) -> bool:
        script: deque[Callable[[], None]] = self.__dict__["script"]
        while not until():
            if not script:
                self.__dict__.setdefault("waited", []).append(why)
                self.draining = True
                return False
            script.popleft()()
        return True

    def emit_event(self, kind: EventKind, **payload: Any) -> None:
        self.__dict__.setdefault("told", []).append((kind, payload))

    def log(self, line: str) -> None:
        self.__dict__.setdefault("heard", []).append(line)


class _Nobody(HandoverSender):
    """Hands versions over to no generator. Notes in `told` the dropped groups that a generator would read.

    It records their staleness bounds in `bounds`, and requests them again while `lost` is not empty.
    """

    def __init__(self, store: MemoryStore, told: list[int], bounds: dict[int, int | None], lost: list[str]) -> None:
        self._store = store
        self._told = told
        self._bounds = bounds
        self._lost = lost

    def publish(self, weights: Weights) -> None:
        self._lost.clear()
        self._bounds[weights.id.policy_version] = weights.manifest.max_staleness
        self._told.append(read_status(self._store, "train", 0)["groups_dropped"])

    def resend_requested(self) -> bool:
        return bool(self._lost)

    def close(self) -> None:
        pass


class TrainerBench:
    """`config` as keys of sections over a small asynchronous config."""

    def __init__(self, store: MemoryStore, model: Callable[[], Any], **config: dict[str, Any]) -> None:
        self.store = store
        self._model = model
        self.config = RunConfig.model_validate(
            {
                "training": {"max_steps": 100, "groups_per_step": 2, **config.pop("training", {})},
                "staleness": {"max_staleness": 2, **config.pop("staleness", {})},
                "generation": {"groups_per_batch": 1},
                **config,
            }
        )
        create_run(store, "bench", self.config.model_dump(mode="json"))
        self._trajectories = StreamWriter(store, layout.trajectories(0), TRAJECTORY, "generate-0")
        self._scores = StreamWriter(
            store, layout.annotations(f"scores/{self.config.scoring.reward}", 0, 0, 1), SCORE, "score-0"
        )
        self._groups = GroupSet.empty(0, 1)
        self._unscored: list[tuple[int, list[float | None], int]] = []
        self._script: deque[Callable[[], None]] = deque()
        self.dropped_at_handover: list[int] = []
        """`groups_dropped` of the status record when each version was handed over."""
        self.bounds: dict[int, int | None] = {}
        """Staleness bound of each version, at its last handover."""
        self.lost: list[str] = []
        """While it is not empty, the last version is requested again."""
        self.stage: Any = None
        """The stage of the last trainer."""

    def commit(
        self,
        group_id: int,
        versions: Sequence[Sequence[int]],
        rewards: Sequence[float | None] | None = None,
        *,
        scored: bool = True,
        truncated: Collection[int] = (),
        source: str = DEFAULT_SOURCE,
    ) -> None:
        """A part of one group, by the version of each token of each member; rewards alternate by default.

        `truncated` are the members that were cut off. Its weights are those of the present trainer, or of the last one.
        """
        rollouts = [
            _trajectory(group_id, source, index, of_tokens, "length" if index in truncated else "stop")
            for index, of_tokens in enumerate(versions)
        ]
        first, tokens = self._trajectories.rows, sum(len(of_tokens) for of_tokens in versions)
        incarnation = self.status.get("incarnation", 0)
        self._groups.add(group_id)
        flat = [version for of_tokens in versions for version in of_tokens]
        self._trajectories.write(
            trajectory_table(
                rollouts,
                first_row_id=first,
                sampling={source: Sampling(temperature=1.0, top_p=1.0, max_new_tokens=16)},
                incarnation=incarnation,
                generator=0,
                epoch=0,
            ),
            tokens=tokens,
            min_policy_version=min(flat),
            max_policy_version=max(flat),
            incarnation=incarnation,
            group_ids=[group_id],
            last_group_id=self._groups.last,
            missing_groups=sorted(self._groups.missing),
        )
        known = [float(i % 2) for i in range(len(versions))] if rewards is None else list(rewards)
        self._unscored.append((first, known, tokens))
        if scored:
            self.score()

    def give_up(self, first_group: int) -> None:
        """Rolls the generator back: it makes this group and all later ones again. Clears the script."""
        self._script.clear()
        self._groups = GroupSet.empty(0, 1)
        for group in range(first_group):
            self._groups.add(group)

    def score(self) -> None:
        """Scores the committed groups."""
        for first, rewards, tokens in self._unscored:
            self._scores.write(score_rows(first, rewards), tokens=tokens)
        self._unscored = []

    def later(self, happens: Callable[[], None]) -> None:
        """Adds an action to the script: one runs each time the trainer has to wait."""
        self._script.append(happens)

    def generator(self, oldest_version_in_flight: int | None, **values: Any) -> None:
        """The generator's status record, of now."""
        record = {"t": time.time(), "doing": "generate", "oldest_version_in_flight": oldest_version_in_flight}
        write_progress(self.store, "generate", 0, {**record, **values})

    def train(self, **staleness: Any) -> int:
        """Trains until the script is over and the trainer would wait. Returns its version."""
        config = self.config.model_copy(
            update={"staleness": self.config.staleness.model_copy(update=staleness)}, deep=True
        )
        arguments = StageArguments(run_url=self.store.url, attempt=0, replica=0, handover=Path("/nowhere"))
        self.stage = HurriedStage(name="train", arguments=arguments, config=config, store=self.store)
        self.stage.__dict__["script"] = self._script
        trainer = Trainer(self._model(), config.training)
        with open_train_state(self.stage, trainer) as state:
            turns = DeviceTurns(self.stage, Device(), trainer)
            nobody = _Nobody(self.store, self.dropped_at_handover, self.bounds, self.lost)
            TrainLoop(state, turns, Handover(trainer, nobody), (1, 3), config.training.max_steps).run()
        self.stage.close()
        return trainer.policy_version

    @property
    def account(self) -> Account:
        """The account in the latest checkpoint."""
        checkpoint = read_latest(self.store)
        assert checkpoint is not None
        return Account.from_json(checkpoint.state["account"])

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.store, "train", 0)

    def consumed(self) -> list[dict[str, Any]]:
        reader = StreamReader(self.store, layout.CONSUMED, CONSUMED)
        return [row for part in iter(reader.next, None) for row in part.table.to_pylist()]

    def trainer_logprobs(self) -> list[list[float]]:
        """Returns the stored log-probabilities of each trained member, in the order of the steps."""
        reader = StreamReader(self.store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)
        return [row for part in iter(reader.next, None) for row in part.table["trainer_logprobs"].to_pylist()]

    def outcomes(self) -> dict[int, list[str]]:
        """The outcome of each member, by group."""
        result: dict[int, list[str]] = {}
        for row in self.consumed():
            result.setdefault(row["group_id"], []).append(row["outcome"])
        return result

    def metric(self, name: str) -> list[float]:
        reader = StreamReader(self.store, layout.metrics("train", 0), METRIC)
        tables = [part.table for part in iter(reader.next, None)]
        return [value for table in tables for value in table.filter(pc.equal(table["name"], name))["value"].to_pylist()]


def _trajectory(
    group_id: int, source: str, index: int, versions: Sequence[int], finish_reason: FinishReason
) -> Trajectory:
    starts = [t for t, version in enumerate(versions) if t == 0 or version != versions[t - 1]]
    return Trajectory(
        request=Request(
            group_id=group_id,
            source=source,
            sample_index=index,
            prompt=Prompt(prompt_id=f"p{group_id}", text="1+1=", answer="2", source="test"),
            prompt_tokens=(1, 3),
            seed=0,
        ),
        response=Response(
            tokens=tuple(3 + (group_id + index + t) % 10 for t in range(len(versions))),
            rollout_logprobs=(-1.0,) * len(versions),
            version_spans=tuple((versions[start], start) for start in starts),
            finish_reason=finish_reason,
        ),
        t_started=1.0,
        t_finished=2.0,
    )
