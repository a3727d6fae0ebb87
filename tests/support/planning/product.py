"""The product's own stages in virtual time, on scripted durations and lengths: without a policy."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import torch
from support.planning.scripted_engine import VOCAB_SIZE, ScriptedEngine
from support.stores.dict_store import DictStore

from benchmarks.sleeping.pace import AGREED_LOGPROBS
from benchmarks.sleeping.score import SleepingReward
from benchmarks.virtual_time.clock import VirtualClock
from benchmarks.virtual_time.run import Parts, run
from configs.schema import RunConfig
from millrace.chat.encoder import Encoded
from millrace.models.decoder import Decoder
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths
from millrace.planning.simulation.outcome import Trace, Trained
from millrace.rollouts.consumed import TRAINED, read_consumed
from millrace.training.batch import Sample
from millrace.training.parallel.ranks import Ranks
from millrace.training.step_report import StepReport
from millrace.types import Prompt

_PROMPTS = [Prompt(prompt_id="p", text="", answer="", source="test")]


def run_product(config: RunConfig, costs: Costs, lengths: Lengths) -> Trace:
    """A run from its start to `training.max_steps`: what was admitted before the last step ended, and the steps."""
    clock, store = VirtualClock(), DictStore()
    encoder: Any = _ConstantPrompts(lengths)
    trainer: Any = _ScriptedTrainer(clock, costs)
    parts = Parts(
        clock=clock,
        costs=lambda: costs,
        prompts=_PROMPTS,
        encoder=encoder,
        probed=(0,),
        engine=lambda: ScriptedEngine(clock, costs, lambda group, member: lengths.of_group(group)[1][member]),
        reward=SleepingReward(0.0),
        decode=Decoder(lambda rows: [""] * len(rows), special=(), dropped=()),
        trainer=trainer,
    )
    admitted = run(config, parts, store)
    rows = read_consumed(store).to_pylist()
    trained = [_step(list(of_step)) for _, of_step in groupby(rows, key=lambda row: row["policy_version"])]
    return Trace(admitted=[one for one in admitted if one.t < trained[-1].t], trained=trained)


class _ConstantPrompts:
    """An encoder of prompts that are all as long as the first one of `lengths`."""

    def __init__(self, lengths: Lengths) -> None:
        self._prompt_tokens, _ = lengths.of_group(0)

    def encode(self, prompt: Prompt) -> Encoded:
        return Encoded((0,) * self._prompt_tokens)


class _ScriptedTrainer:
    """A policy without tensors."""

    def __init__(self, clock: VirtualClock, costs: Costs) -> None:
        self.policy_version = 0
        self.vocab_size = VOCAB_SIZE
        self.ranks = Ranks.alone(torch.device("cpu"))
        self._clock = clock
        self._costs = costs

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        self.policy_version += 1
        numbers: dict[str, Any] = {number.name: 0 for number in fields(StepReport)}
        numbers["ratio_effective_sample_size"] = 1.0
        numbers["trainer_logprobs"] = [sample.rollout_logprobs for sample in samples]
        return StepReport(**numbers)

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def tensors(self) -> dict[str, Any]:
        self._clock.sleep(self._costs.checkpoint)
        return {}

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)


def _step(rows: Sequence[dict[str, Any]]) -> Trained:
    trained = {row["group_id"] for row in rows if row["outcome"] == TRAINED}
    dropped = dict.fromkeys(row["group_id"] for row in rows if row["group_id"] not in trained)
    return Trained(
        t=rows[0]["t"], policy_version=rows[0]["policy_version"], groups=tuple(sorted(trained)), dropped=tuple(dropped)
    )
