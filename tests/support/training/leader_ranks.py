"""Two gloo ranks, one that leads and one that follows, and the result of each command, as a report.

launch 2 -m support.training.leader_ranks RUN REPORT      `alone` in the report: a single rank that did the same
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.stores.faulty_store import flip_a_bit
from support.training.checkpoint_ranks import make_model, samples

from configs.training import TrainingConfig
from millrace.forking import process_settings
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.leader import LeaderTrainer, checkpoints_of, follow, restore
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.trainer import Trainer
from storage.checkpoints import CheckpointWriter, stored_checkpoints
from storage.errors import StreamCorrupt
from storage.stores.base import Store
from storage.stores.factory import open_store

TOKENS = (1, 5, 9)


def make_trainer(kind: type[Trainer], ranks: Ranks) -> Trainer:
    training = TrainingConfig(max_steps=9, learning_rate=1e-3, weight_decay=0.01, max_tokens_per_microbatch=40)
    return kind(make_model(1), training, ranks=ranks)


def main(url: str, report: Path) -> None:
    rank, store = process_settings.tie_to_launcher(), open_store(url)
    ranks = Ranks.join(data=2, tensor=1, device="cpu")
    if rank == 0:
        report.write_text(json.dumps(_lead(make_trainer(LeaderTrainer, ranks), store, Path(url))))
        return
    trainer = make_trainer(Trainer, ranks)
    with AsyncCheckpoints(store, ranks, None) as checkpoints:
        follow(trainer, checkpoints, None)
    ranks.leave()


def _lead(trainer: Trainer, store: Store, run: Path) -> dict[str, Any]:
    alone, report = make_trainer(Trainer, ALONE), dict[str, Any]()
    with checkpoints_of(trainer, store, CheckpointWriter(store)) as checkpoints:
        trainer.warm_up()
        logprobs, expected = (one.step(samples(1)).trainer_logprobs for one in (trainer, alone))
        report["log π"] = max(float(np.abs(a - b).max()) for a, b in zip(logprobs, expected, strict=True))
        report["weights"] = _apart(trainer.weights(), alone.weights())
        next_logprobs, next_expected = (one.next_logprobs(TOKENS, 4) for one in (trainer, alone))
        report["next tokens"] = list(next_logprobs) == list(next_expected)
        checkpoints.begin(1, trainer.tensors(), {"n": 1})
        trainer.step(samples(2))
        checkpoints.begin(2, trainer.tensors(), {"n": 2})
        checkpoints.finish()
        first, second = stored_checkpoints(store)[1], stored_checkpoints(store)[2]
        report["states"] = [first.state, second.state]
        report["damaged"] = second.files["model-1-of-2.safetensors"].path
        flip_a_bit(run / report["damaged"])
        try:
            restore(trainer, store, second)
        except StreamCorrupt as error:
            report["found damaged"] = error.file
        restore(trainer, store, first)
        trainer.sleep()
        trainer.wake()
        report["version"] = trainer.policy_version
        report["restored weights"] = _apart(trainer.weights(), alone.weights())
        for one in (trainer, alone):
            one.step(samples(2))
        report["next step"] = _apart(trainer.weights(), alone.weights())
    return report


def _apart(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert list(weights) == list(expected)
    return max(float((weights[name] - expected[name]).abs().max()) for name in weights)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
