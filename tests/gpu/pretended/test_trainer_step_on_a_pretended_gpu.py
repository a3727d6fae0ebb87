"""The trainer's step on a pretended GPU: no tensor on the wrong device, and no wait that is not listed here.

Where the CPU waits for a GPU, the GPU then waits for the CPU: it has nothing queued. So each wait has its reason:

| per           | waits | why |
|---------------|-------|-----|
| microbatch    | 1     | are its numbers finite? A policy that diverged is named before it is trained |
| update        | 1     | the gradient's norm, for the same reason, and for the report |
| update        | 1 copy of the token table: 7 columns of 8 bytes per token | the report's quantiles |
| step          | 1 copy of 8 bytes per token | log π of the tokens, which is stored |
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from support.gpu.pretend_gpu import GPU, PretendGpu, pretend_gpu
from support.training.sharded_trainers import CASES, Case, make_trainer, samples

from configs.training import LossName
from millrace.training.losses.base import Loss, LossTokens, TokenLosses
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.trainer import Trainer

# FSDP2, which one process with a `compute_dtype` uses too, asks for CUDA's streams; transformers' mixtures of experts
# ask for the device's capability.
_WHOLE = sorted(name for name, case in CASES.items() if case.compute_dtype is None and "moe" not in name)
_NUMBER = 8
"""Bytes of a float64."""
_COLUMNS = 7


class Counting(Loss):
    """A loss that counts the microbatches it is asked for."""

    def __init__(self, own: Loss) -> None:
        super().__init__(own.training)
        self.name = own.name  # type: ignore[misc]
        self.microbatches = 0
        self._own = own

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        self.microbatches += 1
        return self._own(tokens)


def stepped(case: Case, gpu: PretendGpu) -> tuple[Trainer, int]:
    """A trainer on `gpu` after two steps, and the microbatches of the second, whose counts `gpu` has."""
    trainer = make_trainer(case, Ranks.alone(GPU), None)
    trainer.step(samples(5, seed=0, shared_prompt=case.shared_prompt))
    loss = Counting(trainer.loss)
    trainer.train_with(loss)
    gpu.forget()
    trainer.step(samples(5, seed=1, shared_prompt=case.shared_prompt))
    return trainer, loss.microbatches


@pytest.mark.parametrize("name", _WHOLE)
def test_a_step_mixes_no_devices_and_is_that_of_a_cpu_bit_for_bit(name: str) -> None:
    case = CASES[name]
    on_cpu = make_trainer(case, ALONE, None)
    for seed in range(2):
        expected = on_cpu.step(samples(5, seed=seed, shared_prompt=case.shared_prompt))
    with pretend_gpu() as gpu:
        trainer, _ = stepped(case, gpu)
        assert all(weight.is_cuda for weight in trainer.weights().values())
    assert expected.grad_norm > 0
    for mine, other in zip(trainer.weights().values(), on_cpu.weights().values(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama aipo", "qwen3 gspo", "qwen3 updates", "qwen3 lora", "gemma3 one prompt"])
def test_a_step_waits_for_the_gpu_as_often_as_listed_above(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    with pretend_gpu() as gpu:
        _, num_microbatches = stepped(case, gpu)
    training = case.training
    updates = training.minibatches * training.epochs
    assert gpu.waits.pop("training/optimization/gradients.py:clipped_norm") == updates
    assert gpu.waits.pop("training/losses/base.py:check_finite") == num_microbatches
    assert not gpu.waits
    num_tokens = sum(len(one.response_tokens) for one in samples(5, seed=1, shared_prompt=case.shared_prompt))
    copied = gpu.copied_to_host
    assert copied.pop("training/step_report.py:carrying") == updates * num_tokens * _NUMBER * _COLUMNS
    assert copied.pop("training/step_report.py:report") == num_tokens * _NUMBER
    if training.kl.coefficient:
        # The reference's table of rotary frequencies. Its weights come from the CPU, and are not copied back.
        assert copied.pop("models/offload.py:visiting") < 64
    assert not copied


@pytest.mark.parametrize("loss", get_args(LossName))
def test_no_loss_waits_for_the_gpu(loss: str) -> None:
    case = replace(CASES["llama aipo"], training=CASES["llama aipo"].training.model_copy(update={"loss": loss}))
    with pretend_gpu() as gpu:
        stepped(case, gpu)
    expected = {"training/losses/base.py:check_finite", "training/optimization/gradients.py:clipped_norm"}
    assert set(gpu.waits) == expected


def test_16_bit_weights_are_attended_to_by_the_kernel_for_packed_sequences() -> None:
    case = replace(CASES["llama aipo"], dtype=torch.bfloat16)
    with pretend_gpu() as gpu:
        stepped(case, gpu)
    assert gpu.stood_in["torch_attn._varlen_attn.default"] > 0
    assert gpu.stood_in["torch_attn._varlen_attn_backward.default"] > 0
