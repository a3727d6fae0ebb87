"""The gradient towards a teacher against autograd of KL(π‖π_T) over the whole vocabulary."""

import numpy as np
import pytest
import torch
from support.training.samples import make_sample

from configs.training import TrainingConfig
from millrace.training.batch import Microbatch
from millrace.training.objective import Objective
from millrace.training.packing import microbatches

VOCAB = 7
random = np.random.default_rng(5)
LOGITS = torch.tensor(random.normal(size=VOCAB))
ROLLOUT, TEACHER = (np.log(random.dirichlet(np.ones(VOCAB))).astype(np.float32) for _ in range(2))
"""[V] log μ and log π_T."""


def objective(**distillation: object) -> Objective:
    loss = {"name": "aipo", "max_importance_ratio": 1e9}
    return Objective(
        TrainingConfig.model_validate(
            {"max_steps": 1, "loss": loss, "distillation": {"teacher": "expert", **distillation}}
        )
    )


def every_token(advantage: float = 0.0) -> Microbatch:
    """A response of one token for each id of the vocabulary."""
    samples = [
        make_sample(
            [1],
            [token],
            advantage=advantage,
            rollout_logprobs=ROLLOUT[token],
            teacher_logprobs=TEACHER[token : token + 1],
        )
        for token in range(VOCAB)
    ]
    (batch,) = microbatches(samples, 1000, share_prefixes=False)
    return batch


def gradients(chosen: Objective, advantage: float = 0.0) -> torch.Tensor:
    """[V, V] gradient of the loss of a sample of each token, by its id, for the policy's logits."""
    batch = every_token(advantage)
    logits_V = LOGITS.clone().requires_grad_()
    logprobs_N = torch.log_softmax(logits_V, 0)[batch.targets_N]
    loss_N = chosen.compute(batch, logprobs_N, None, None).loss
    rows = [torch.autograd.grad(loss, logits_V, retain_graph=True)[0] for loss in loss_N]
    return torch.stack(rows)[batch.targets_N.argsort()]


def exact_gradient() -> torch.Tensor:
    """[V] of the reverse KL to the teacher."""
    logits_V = LOGITS.clone().requires_grad_()
    logprobs_V = torch.log_softmax(logits_V, 0)
    (logprobs_V.exp() * (logprobs_V - torch.tensor(TEACHER).double())).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_mean_gradient_over_samples_of_another_policy_is_that_of_the_reverse_kl(coefficient: float) -> None:
    mean_V = torch.tensor(ROLLOUT).double().exp() @ gradients(objective(coefficient=coefficient))
    torch.testing.assert_close(mean_V, coefficient * exact_gradient(), rtol=0, atol=1e-10)


def test_the_estimate_from_samples_is_unbiased() -> None:
    num_samples = 100_000
    shares = np.exp(ROLLOUT.astype(np.float64))
    tokens = np.random.default_rng(0).choice(VOCAB, num_samples, p=shares / shares.sum())
    drawn = gradients(objective()).numpy()[tokens]
    errors = drawn.std(axis=0, ddof=1) / np.sqrt(num_samples)
    assert np.all(np.abs(drawn.mean(axis=0) - exact_gradient().numpy()) < 3 * errors)


def test_the_reward_and_the_teacher_add_up() -> None:
    chosen = objective()
    torch.testing.assert_close(
        gradients(chosen, 0.5) - gradients(chosen), gradients(objective(coefficient=1e-300), 0.5), rtol=0, atol=1e-12
    )


def test_a_response_without_advantage_has_a_gradient_if_there_is_a_teacher() -> None:
    sample = make_sample([1], [2], advantage=0.0, teacher_logprobs=TEACHER[:1])
    assert objective().has_gradient(sample)
    assert not Objective(TrainingConfig(max_steps=1)).has_gradient(sample)
