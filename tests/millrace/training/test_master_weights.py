"""Small updates of a bfloat16 model add up: the trainer keeps float32, and generators get bfloat16."""

from typing import Any

import numpy as np
import pytest
import torch
from support.training.samples import make_sample
from support.training.sharded_trainers import tiny_qwen3

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer

TARGETS = ["q_proj", "down_proj"]
LORA = {"rank": 4, "target_modules": TARGETS}


def make_trainer(dtype: torch.dtype, published_dtype: torch.dtype | None = None, **training: Any) -> Trainer:
    config = TrainingConfig.model_validate({"max_steps": 9, "learning_rate": 1e-6, **training})
    torch.manual_seed(0)
    model = tiny_qwen3()
    for parameter in model.parameters():
        # As a model that is loaded: its buffers stay float32.
        parameter.data = parameter.data.to(dtype)
    return Trainer(model, config, published_dtype=published_dtype)


def batch() -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        make_sample(random.integers(1, 15, 4), random.integers(1, 15, 6), rollout_logprobs=-2.5, advantage=advantage)
        for advantage in (1.0, -1.0)
    ]


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


def share_changed(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor]) -> float:
    changed = sum(int((end[name].float() != tensor.float()).sum()) for name, tensor in start.items())
    return changed / sum(tensor.numel() for tensor in start.values())


def test_small_updates_of_a_bfloat16_model_are_kept() -> None:
    trainer = make_trainer(torch.bfloat16)
    start = whole(trainer)
    for _ in range(3):
        trainer.step(batch())
    end = whole(trainer)
    assert {tensor.dtype for tensor in end.values()} == {torch.float32}
    assert share_changed(start, end) > 0.9
    slots = trainer.tensors()["optimizer"]
    assert {tensor.dtype for name, tensor in slots.items() if name.startswith("exp_avg")} == {torch.float32}


def test_the_changed_share_is_that_of_what_generators_get() -> None:
    shares = {}
    for published in (torch.float32, torch.bfloat16):
        trainer = make_trainer(torch.bfloat16, published)
        start = {name: tensor.to(published) for name, tensor in whole(trainer).items()}
        shares[published] = trainer.step(batch()).changed_weight_share
        end = {name: tensor.to(published) for name, tensor in whole(trainer).items()}
        assert shares[published] == pytest.approx(share_changed(start, end))
    assert shares[torch.bfloat16] < 0.1 < 0.9 < shares[torch.float32]


def test_a_bfloat16_model_still_computes_in_bfloat16() -> None:
    tokens = (1, 2, 3, 4)
    masters, plain = make_trainer(torch.bfloat16), make_trainer(torch.float32, compute_dtype="bfloat16")
    plain.copy_state_from(masters)
    assert masters.next_logprobs(tokens, 4) == plain.next_logprobs(tokens, 4)


def test_adapters_of_a_bfloat16_model_are_float32_and_its_own_weights_stay() -> None:
    trainer = make_trainer(torch.bfloat16, lora=LORA, learning_rate=1e-2)
    start = whole(trainer)
    share = trainer.step(batch()).changed_weight_share
    end = whole(trainer)
    assert {tensor.dtype for name, tensor in trainer.tensors()["model"].items() if "lora_" in name} == {
        torch.float32,
        torch.float64,
    }
    assert {tensor.dtype for tensor in end.values()} == {torch.bfloat16}
    differing = {name for name, tensor in start.items() if not torch.equal(end[name], tensor)}
    assert differing
    assert all(any(target in name for target in TARGETS) for name in differing)
    assert 0 < share < 1


def test_frozen_layers_of_a_bfloat16_model_stay_bfloat16() -> None:
    trainer = make_trainer(torch.bfloat16, frozen_layers=1)
    trainer.step(batch())
    dtypes = {name: tensor.dtype for name, tensor in trainer.weights().items()}
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.layers.1.mlp.up_proj.weight"] == torch.float32


def test_a_checkpoint_of_a_bfloat16_model_is_restored_bit_for_bit() -> None:
    trainer, again = make_trainer(torch.bfloat16), make_trainer(torch.bfloat16)
    trainer.step(batch())
    again.restore(1, trainer.state())
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name
