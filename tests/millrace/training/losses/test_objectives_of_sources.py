"""A batch whose sources have different objectives: each token has the loss of its source."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training.update_batches import batch_of_groups
from transformers import LlamaForCausalLM

from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer

MakeModel = Callable[..., LlamaForCausalLM]
RUN: dict[str, Any] = {"max_steps": 9, "loss": "reinforce", "max_grad_norm": 1e9, "max_tokens_per_microbatch": 40}
OWN: dict[str, dict[str, Any]] = {
    "sums": {"loss": "aipo"},
    "chat": {
        "loss": {"name": "ppo_clip", "clip_high": 0.1},
        "aggregation": "sequence_mean",
        "kl": {"coefficient": 0.5},
    },
    "code": {"masks": {"max_kl": 0.5}, "entropy_coefficient": 0.2},
}
KL = {"coefficient": 0.1}


def training(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({**RUN, "kl": KL, **changes})


def trainer(make_model: MakeModel, run: TrainingConfig, **own: TrainingConfig) -> Trainer:
    reference: LlamaForCausalLM | None = make_model(1) if run.kl.coefficient else None
    return Trainer(make_model(0), run, trainings=own, reference=reference)


def gradients(of: Trainer, samples: list[Sample]) -> dict[str, torch.Tensor]:
    of.step(samples)
    return {
        name: parameter.grad.clone() for name, parameter in of.model.named_parameters() if parameter.grad is not None
    }


def mixed() -> list[Sample]:
    return [replace(sample, source=(*OWN, "other")[sample.group % 4]) for sample in batch_of_groups(8)]


def test_the_gradient_is_the_sum_of_those_of_the_sources_by_their_shares(make_model: MakeModel) -> None:
    samples = mixed()
    whole = gradients(trainer(make_model, training(), **{name: training(**own) for name, own in OWN.items()}), samples)
    expected: dict[str, torch.Tensor] = {}
    for name in (*OWN, "other"):
        own = training(**OWN.get(name, {}))
        part = gradients(trainer(make_model, own), [sample for sample in samples if sample.source == name])
        expected = {key: expected.get(key, 0) + value / 4 for key, value in part.items()}
    for key, value in whole.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def test_sources_with_the_runs_objective_change_nothing(make_model: MakeModel) -> None:
    samples = mixed()
    alone = gradients(trainer(make_model, training()), samples)
    listed = gradients(trainer(make_model, training(), sums=training(), chat=training(learning_rate=1.0)), samples)
    assert all(torch.equal(listed[key], value) for key, value in alone.items())


def test_a_source_without_penalty_has_no_distance_to_the_reference(make_model: MakeModel) -> None:
    free = training(kl={"coefficient": 0.0})
    of = trainer(make_model, training(), sums=free)
    report = of.step([sample for sample in mixed() if sample.source == "sums"])
    assert report.kl_to_reference == 0.0


def test_replacing_the_loss_replaces_that_of_every_source(make_model: MakeModel) -> None:
    samples = [sample for sample in mixed() if sample.source == "sums"]
    of = trainer(make_model, training(), sums=training(loss="aipo"))
    plain = trainer(make_model, training())
    of.set_loss(plain.loss)
    expected = gradients(plain, samples)
    assert all(torch.equal(value, expected[key]) for key, value in gradients(of, samples).items())


def test_an_unusable_loss_names_its_source(make_model: MakeModel) -> None:
    with pytest.raises(InputError) as caught:
        trainer(make_model, training(), chat=training(loss="nowhere:at_all"))
    assert caught.value.key == "sources.chat.training.loss"
