"""A small run in a store, written step by step as the stages do: two generators, two scorers, one trainer."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.stores.dict_store import DictStore

from configs.stored import DEFAULT_SOURCE, AnnotatorPools
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.ledger import Account
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.record import create_run
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.files import checksum
from storage.streams.stream import StreamWriter

MakeTrajectories = Callable[..., list[Trajectory]]

GENERATORS, SCORERS, GROUP_SIZE, VOCAB_SIZE = 2, 2, 2, 15
REWARD = "exact_match"
CONFIG = {
    "generation": {"replicas": GENERATORS},
    "scoring": {"reward": REWARD, "replicas": SCORERS},
}


class SmallRun:
    """A run that a test continues step by step."""

    def __init__(self, store: Store, make_trajectories: MakeTrajectories) -> None:
        self.store = store
        create_run(store, "small", CONFIG)
        self._make_trajectories = make_trajectories
        self._trajectories = [self._generator(g) for g in range(GENERATORS)]
        self._scores = [
            [
                StreamWriter(store, layout.annotations(f"scores/{REWARD}", g, s, SCORERS), SCORE, f"score-{s}")
                for s in range(SCORERS)
            ]
            for g in range(GENERATORS)
        ]
        self._parts: list[list[list[Trajectory]]] = [[] for _ in range(GENERATORS)]
        self._metrics = StreamWriter(store, layout.metrics("train", 0), METRIC, "train-0")
        self._checkpoints = CheckpointWriter(store)
        self._weights = CheckpointWriter(store, layout.WEIGHTS, writer="sync_weights")
        self.loader = self.open_loader(None)
        self.account = Account()
        self.version = 0

    def open_loader(self, state: list[dict[str, Any]] | None) -> RolloutLoader:
        return RolloutLoader(
            self.store,
            pools=AnnotatorPools({f"scores/{REWARD}": SCORERS}),
            num_generators=GENERATORS,
            vocab_size=VOCAB_SIZE,
            lineage=Lineage.after(None, 0),
            state=state,
        )

    def generate(self, generator: int, num_groups: int = 1) -> None:
        """Commits one part, sampled by the present version."""
        made = sum(len(part) for part in self._parts[generator]) // GROUP_SIZE
        group_ids = [generator + GENERATORS * (made + i) for i in range(num_groups)]
        rollouts = self._make_trajectories(group_ids, GROUP_SIZE, self.version)
        writer = self._trajectories[generator]
        table = trajectory_table(
            rollouts,
            first_row_id=writer.rows,
            sampling={DEFAULT_SOURCE: Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)},
            incarnation=0,
            generator=generator,
            epoch=writer.epoch,
        )
        writer.write(
            table,
            tokens=tokens_of(rollouts),
            min_policy_version=self.version,
            max_policy_version=self.version,
            incarnation=0,
            group_ids=group_ids,
            last_group_id=group_ids[-1],
        )
        self._parts[generator].append(rollouts)

    def score(self, generator: int, scorer: int) -> bool:
        """Scores that scorer's next part of the generator; False if there is none."""
        writer = self._scores[generator][scorer]
        number = writer.parts * SCORERS + scorer
        parts = self._parts[generator]
        if number >= len(parts):
            return False
        first = sum(len(part) for part in parts[:number])
        writer.write(score_table(first, len(parts[number])), tokens=tokens_of(parts[number]))
        return True

    def score_everything(self) -> None:
        for generator in range(GENERATORS):
            for scorer in range(SCORERS):
                while self.score(generator, scorer):
                    pass

    def train(self, num_groups: int = 1) -> None:
        """Makes the next version from up to `num_groups` groups, without members whose verifier failed."""
        groups = []
        for _ in range(num_groups):
            if (group := self.loader.take()) is not None:
                assert isinstance(group, ScoredGroup)
                groups.append(group)
                self._account_for(group)
        self.version += 1
        if groups:
            lengths = [len(group.response_tokens[i]) for group in groups for i in group.verified]
            logprobs, entropies = ([np.full(length, nats, np.float32) for length in lengths] for nats in (-0.5, 0.5))
            # Closing writes its rows and ends its threads.
            with closing(ConsumedWriter(self.store, self._checkpoints.incarnation)) as consumed:
                consumed.step(self.version, groups, [0.5] * len(lengths), logprobs, entropies)

    def _account_for(self, group: ScoredGroup) -> None:
        staleness = self.version - group.min_policy_version
        amount = group.amount(group.verified)
        self.account.train(amount, generator=group.generator, staleness=staleness, reward_sum=0.5)
        failed = group.amount() - amount
        if failed.rollouts:
            self.account.drop("error", failed, generator=group.generator, reward_sum=0.0)

    def checkpoint(self) -> None:
        state = {"account": self.account.to_json(), "intake": self.loader.state(), "lineage": {}}
        files = {name: f"{name} of {self.version}".encode() * 9 for name in ("model", "optimizer")}
        self._checkpoints.commit(self.version, files, state)

    def adopt(self) -> None:
        """Replaces the trainer; the new one commits the latest checkpoint again."""
        self._checkpoints = CheckpointWriter(self.store)
        latest = self._checkpoints.latest
        assert latest is not None
        self._checkpoints.adopt(latest, latest.state)

    def return_to_latest(self) -> None:
        """Replaces the trainer by one that resumes from the latest checkpoint."""
        self.adopt()
        latest = self._checkpoints.latest
        assert latest is not None
        self.version, self.account = latest.step, Account.from_json(latest.state["account"])
        self.loader = self.open_loader(latest.state["intake"])

    def send_weights(self) -> None:
        weights_id = {"incarnation": 0, "policy_version": self.version, "t_offered": 1.5}
        self._weights.commit(self.version, {"weights.safetensors": b"weights" * (self.version + 1)}, weights_id)

    def promote(self) -> None:
        """Promotes the present version."""
        version = self.version
        decision = {"promoted": True, "policy_version": version, "accuracy": 0.5, "sentence": "better", "bar": 0.25}
        evaluation = {"policy_version": version, "accuracy": 0.5, "prompts": 8}
        state = {"decision": decision, "evaluation": evaluation, "incarnation": 1, "attempt": 0}
        files = {"config.json": b"{}", "model.safetensors": f"promoted {self.version}".encode() * 9}
        CheckpointWriter(self.store, layout.PROMOTED, writer="promote").commit(self.version, files, state)

    def measure(self) -> None:
        rows = [{"t": 1.5, "incarnation": 0, "policy_version": self.version, "name": "loss", "value": 0.25}]
        self._metrics.write(pa.Table.from_pylist(rows, schema=METRIC), tokens=0)

    def restart_generator(self, generator: int) -> None:
        self._trajectories[generator] = self._generator(generator)

    def put_start_model(self) -> None:
        data = b"weights of version 0"
        path = f"{layout.START_MODEL}/model.safetensors"
        self.store.put_if_absent(path, data)
        files = {"model.safetensors": {"path": path, "bytes": len(data), "checksum": checksum(data)}}
        self.store.put_if_absent(layout.START_MANIFEST, json.dumps({"files": files}).encode())

    def campaign(self, versions: int = 6) -> "SmallRun":
        """Makes some versions; the last parts are not trained yet, and the last one is not scored."""
        self.put_start_model()
        for _ in range(versions):
            for generator in range(GENERATORS):
                self.generate(generator)
                self.generate(generator, num_groups=2)
            self.score_everything()
            self.train(num_groups=5)
            self.measure()
            self.send_weights()
            self.checkpoint()
        self.generate(0)
        return self

    def _generator(self, generator: int) -> StreamWriter:
        return StreamWriter(
            self.store,
            layout.trajectories(generator),
            TRAJECTORY,
            f"generate-{generator}",
            vocab_size=VOCAB_SIZE,
            group_size=GROUP_SIZE,
        )


def score_table(first_row_id: int, rows: int) -> pa.Table:
    """Scores of consecutive rows; the verifier fails for every fifth one."""
    scored = {"components": "{}", "status": "ok", "error": None, "verifier_version": "1", "seconds": 0.0}
    failed = scored | {"reward": None, "status": "error", "error": "broken"}
    return pa.Table.from_pylist(
        [
            {"row_id": row, "t_scored": 2.0, **(failed if row % 5 == 4 else scored | {"reward": row / 8})}
            for row in range(first_row_id, first_row_id + rows)
        ],
        schema=SCORE,
    )


def tokens_of(rollouts: list[Trajectory]) -> int:
    return sum(len(rollout.response.tokens) for rollout in rollouts)


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


@pytest.fixture
def small_run(dict_store: DictStore, make_trajectories: MakeTrajectories) -> SmallRun:
    """A campaign of six versions in a `DictStore`."""
    return SmallRun(dict_store, make_trajectories).campaign()


@pytest.fixture(scope="session")
def start_run(make_trajectories: MakeTrajectories) -> Callable[[Store], SmallRun]:
    """`start(store)`: a new run."""
    return lambda store: SmallRun(store, make_trajectories)
