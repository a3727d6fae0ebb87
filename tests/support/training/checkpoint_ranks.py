"""Four gloo ranks that hand one policy on through a run's checkpoints, from layout to layout; torchrun starts them.

    version 2: 4 ranks ──► 2 ranks: version 3 ──► 1 rank: version 4 ──► 2 × 2 ranks: version 5 ──► 4 ranks
                     └───► 1 rank: version 3 once more, as the 2 ranks made it

Then all four train to version 6, and only rank 2 can't write its files of it.

    torchrun --nproc-per-node 4 -m support.training.checkpoint_ranks RUN REPORTS

Each rank writes REPORTS/<rank>.json: `apart`, the largest difference of a weight or moment by the name of the
comparison, rank 0 alone; and `failure`, its error while version 6 was saved.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.stores.faulty_store import FaultyStore
from support.training.samples import make_sample
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.checkpoints.reading import StoredFiles
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer
from storage.checkpoints import CheckpointWriter, read_latest, stored_checkpoints
from storage.stores.base import Store
from storage.stores.factory import open_store

VOCAB = 33
Whole = Mapping[str, torch.Tensor]
"""Weights and optimizer state, gathered from all ranks, by kind and name."""


def make_model(seed: int) -> PreTrainedModel:
    """Small, random, with sizes that few numbers of ranks divide evenly."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def make_trainer(ranks: Ranks, seed: int) -> Trainer:
    training = TrainingConfig(max_steps=9, learning_rate=1e-2, weight_decay=0.01, max_tokens_per_microbatch=40)
    return Trainer(make_model(seed), training, ranks=ranks)


def samples(seed: int) -> list[Sample]:
    random = np.random.default_rng(seed)

    def draw(length: int) -> Sample:
        prompt, response = random.integers(VOCAB, size=3), random.integers(VOCAB, size=length)
        return make_sample(prompt, response, rollout_logprobs=-3.5, advantage=float(random.normal()))

    return [draw(length) for length in random.integers(2, 12, size=7)]


def main(url: str, reports: Path) -> None:
    four = Ranks.join(data=4, tensor=1, device="cpu")
    store = open_store(url)
    apart: dict[str, float] = {}
    made = by_two = by_one = _train_and_save(store, four, version=2)
    two = _layout(2, 1)
    if two is not None:
        by_two = _hand_on(store, two, made, apart, "4 to 2")
    if four.rank == 0:
        alone = Ranks.alone(torch.device("cpu"))
        again = make_trainer(alone, seed=7)
        again.restore(2, StoredFiles(store, stored_checkpoints(store)[2]))
        again.step(samples(2))
        apart["the next step of 1 rank and of 2"] = _apart(_whole(again), by_two)
        by_one = _hand_on(store, alone, by_two, apart, "2 to 1")
    dist.barrier()
    square = _layout(2, 2)
    assert square is not None
    by_square = _hand_on(store, square, by_one, apart, "1 to 2 x 2")
    trainer = _restored(store, four, by_square, apart, "2 x 2 to 4")
    failure = _fail_to_save(store, four, trainer)
    (reports / f"{four.rank}.json").write_text(json.dumps({"apart": apart, "failure": failure}))
    four.leave()


def _layout(data: int, tensor: int) -> Ranks | None:
    """The first data · tensor of the four ranks; None where this process is none of them. All four must call this."""
    rank, size = dist.get_rank(), data * tensor
    mesh = DeviceMesh("cpu", torch.arange(size).reshape(data, tensor), mesh_dim_names=("data", "tensor"))
    if rank >= size:
        # All four take part in making a group.
        dist.new_group(list(range(size)), backend="gloo")
        return None
    return Ranks(
        rank=rank,
        size=size,
        data_rank=rank // tensor,
        data_size=data,
        tensor_rank=rank % tensor,
        tensor_size=tensor,
        device=torch.device("cpu"),
        mesh=mesh,
    )


def _train_and_save(store: Store, ranks: Ranks, version: int) -> Whole:
    trainer = make_trainer(ranks, seed=1)
    for step in range(version):
        trainer.step(samples(step))
    return _commit(store, ranks, trainer)


def _hand_on(store: Store, ranks: Ranks, made: Whole, apart: dict[str, float], name: str) -> Whole:
    """Takes one step from the latest checkpoint, and commits it."""
    return _commit(store, ranks, _restored(store, ranks, made, apart, name))


def _restored(store: Store, ranks: Ranks, made: Whole, apart: dict[str, float], name: str) -> Trainer:
    """A trainer one step after the latest checkpoint, whose state is compared with `made`."""
    trainer = make_trainer(ranks, seed=7)
    checkpoint = read_latest(store)
    assert checkpoint is not None
    trainer.restore(checkpoint.step, StoredFiles(store, checkpoint))
    whole = _whole(trainer)
    if ranks.rank == 0:
        apart[name] = _apart(whole, made)
    trainer.step(samples(checkpoint.step))
    return trainer


def _commit(store: Store, ranks: Ranks, trainer: Trainer) -> Whole:
    writer = CheckpointWriter(store) if ranks.rank == 0 else None
    whole = _whole(trainer)
    with AsyncCheckpoints(store, ranks, writer) as checkpoints:
        checkpoints.begin(trainer.policy_version, trainer.tensors(), {"version": trainer.policy_version})
        # The checkpoint must hold the state before this step.
        trainer.step(samples(99))
    return whole


def _fail_to_save(store: Store, ranks: Ranks, trainer: Trainer) -> str:
    writer = CheckpointWriter(store) if ranks.rank == 0 else None
    if ranks.rank == 2:
        store = FaultyStore(store, 0, error_before=1.0)
    with AsyncCheckpoints(store, ranks, writer) as checkpoints:
        checkpoints.begin(trainer.policy_version, trainer.tensors(), {})
        try:
            checkpoints.finish()
        except OSError as error:
            return str(error)
    return ""


def _whole(trainer: Trainer) -> Whole:
    return {
        f"{kind}.{name}": (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for kind, named in trainer.tensors().items()
        if kind != "rng"
        for name, tensor in named.items()
    }


def _apart(a: Whole, b: Whole) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
