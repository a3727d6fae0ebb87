"""What surrounds the product's stages in virtual time: a store that is watched, and ends that take scripted times."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from support.planning.timed_engine import VOCAB_SIZE
from support.planning.virtual_clock import VirtualClock
from support.stores.dict_store import DictStore

from benchmarks.sleeping.pace import AGREED_LOGPROBS
from millrace.planning.simulation.costs import Costs
from millrace.runtime.messages import EventKind
from millrace.runtime.stage import Stage
from millrace.training.batch import Sample
from millrace.training.handover import Handover
from millrace.training.parallel.ranks import Ranks
from millrace.training.step_report import StepReport
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.fingerprint import fingerprint
from storage import layout
from storage.stores.base import BytesLike

_DECIDING = ("groups_dropped", "oldest_version_in_flight")
"""What other stages read in a status record and act upon."""


class WatchedStore(DictStore):
    """Tells the clock what was written, unless nothing can depend on it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        created = super().put_if_absent(path, data)
        if path.startswith(("streams/trajectories/", "streams/scores/")):
            self._clock.changed()
        return created

    def put(self, path: str, data: BytesLike) -> None:
        before = self.objects.get(path)
        super().put(path, data)
        if path.startswith(layout.PROGRESS) and (before is None or _said(before) != _said(self.objects[path])):
            self._clock.changed()

    def local_path(self, path: str) -> Path | None:
        # Not remote: there is nothing to fetch ahead.
        return Path("/nowhere") if path == "" else None


def _said(record: bytes) -> list[Any]:
    values = json.loads(record)
    return [values.get(name) for name in _DECIDING]


class SilentStage(Stage):
    """Nobody listens to it."""

    def milestone(self, line: str) -> None:
        """Not sent."""

    def tell(self, kind: EventKind, **payload: Any) -> None:
        """Not sent."""

    def beat(self) -> None:
        """Not sent."""


class Mailbox(WeightsReader):
    """Holds the newest version that was put in."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._newest: Weights | None = None

    def put(self, weights: Weights) -> None:
        self._newest = weights
        self._clock.changed()

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        return self._newest if self._newest is not None and self._newest.id.newer_than(newer_than) else None

    def close(self) -> None:
        """Nothing is open."""


class Pushes(WeightsWriter):
    """Brings versions to every generator, after the time of a push."""

    def __init__(self, clock: VirtualClock, costs: Costs, arrived: Mailbox) -> None:
        self._clock = clock
        self._costs = costs
        self._arrived = arrived

    def offer(self, weights: Weights) -> None:
        self._clock.sleep(self._costs.push)
        self._arrived.put(weights)

    def close(self) -> None:
        """Nothing is open."""


class TimedHandover(Handover):
    """Hands versions over to the stage that pushes them, while the trainer stands still."""

    def __init__(self, clock: VirtualClock, costs: Costs, handed_over: Mailbox) -> None:
        self._clock = clock
        self._costs = costs
        self._handed_over = handed_over

    def offer(self, manifest: Manifest) -> None:
        self._clock.sleep(self._costs.handover)
        self._handed_over.put(Weights(manifest=replace(manifest, fingerprint=fingerprint({})), tensors={}))

    def is_wanted_again(self) -> bool:
        return False


class TimedTrainer:
    """A policy without tensors, which gets a new version after the time of a step."""

    def __init__(self, clock: VirtualClock, costs: Costs) -> None:
        self.policy_version = 0
        self.vocab_size = VOCAB_SIZE
        self.ranks = Ranks.alone(torch.device("cpu"))
        self._clock = clock
        self._costs = costs

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        # Prompts are shared: the config's default.
        prompts = {sample.group: len(sample.prompt_tokens) for sample in samples}
        tokens = sum(prompts.values()) + sum(len(sample.response_tokens) for sample in samples)
        self._clock.sleep(self._costs.train(tokens, len(samples)))
        self.policy_version += 1
        numbers: dict[str, Any] = {number.name: 0 for number in fields(StepReport)}
        numbers["ratio_effective_sample_size"] = 1.0
        numbers["trainer_logprobs"] = [sample.rollout_logprobs for sample in samples]
        return StepReport(**numbers)

    def tensors(self) -> dict[str, Any]:
        self._clock.sleep(self._costs.checkpoint)
        return {}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)
