"""The trainer's step on a pretended GPU: no tensor on the wrong device, and no wait that is not listed here.

Where the CPU waits for a GPU, the GPU then waits for the CPU: it has nothing queued. So each wait has its reason:

| per           | waits | why |
|---------------|-------|-----|
| microbatch    | 1     | are its numbers finite? A policy that diverged is named before it is trained |
| update        | 1     | the gradient's norm, for the same reason, and for the report |
| update        | 1 if `schedule.ess_scaling` | its learning rate depends on its ratios |
| step          | 1     | the numbers of the report, in one copy |
| step          | 1 copy of 8 bytes per token | log π and entropy of the tokens, which are stored |
| step          | 2 copies of a sample of the weights, and 1 | the share of weights that the step changed |
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.gpu.pretend_gpu import GPU, PretendGpu, pretend_gpu
from support.training.sharded_trainers import CASES, Case, make_trainer, samples

from configs.losses import LOSS_NAMES
from millrace.training.attention import packed_attention
from millrace.training.losses.base import LossInputs, LossOutputs
from millrace.training.losses.factory import Loss
from millrace.training.packing import microbatches
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.trainer import Trainer

_WHOLE = sorted(name for name, case in CASES.items() if case.compute_dtype is None)
_IN_16_BITS = ["llama aipo bfloat16", "qwen3 gspo", "qwen3 lora", "gemma3 one prompt", "qwen3_moe aipo"]
_PER_TOKEN = 8
"""Bytes of a token's log-probability and entropy in the report."""


class Counting(Loss):
    """A loss that counts the microbatches it is asked for."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.name, lambda inputs, parameters: loss(inputs), loss.parameters)
        self.microbatches = 0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.microbatches += 1
        return super().__call__(inputs)


def stepped(case: Case, gpu: PretendGpu) -> tuple[Trainer, int]:
    """A trainer on `gpu` after a warm-up and two steps, and the microbatches of the second, whose counts `gpu` has."""
    trainer = make_trainer(case, Ranks.alone(GPU), case.compute_dtype)
    trainer.warm_up()
    trainer.step(samples(5, seed=0, shared_prompt=case.shared_prompt))
    loss = Counting(trainer.loss)
    trainer.set_loss(loss)
    gpu.forget()
    trainer.step(samples(5, seed=1, shared_prompt=case.shared_prompt))
    return trainer, loss.microbatches


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama aipo", "qwen3 gspo", "qwen3 updates", "qwen3 lora", "gemma3 one prompt"])
def test_a_step_waits_for_the_gpu_as_often_as_listed_above(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    with pretend_gpu() as gpu:
        _, num_microbatches = stepped(case, gpu)
    assert_listed(gpu, case, num_microbatches)


def assert_listed(gpu: PretendGpu, case: Case, num_microbatches: int) -> None:
    training = case.training
    updates = training.minibatches * training.epochs
    assert gpu.waits.pop("training/optimizer.py:clip_gradients") == updates
    assert gpu.waits.pop("training/losses/excluded.py:check_finite") == num_microbatches
    assert gpu.waits.pop("training/parallel/sharding.py:changed_share") == 1
    assert gpu.waits.pop("training/step_report.py:report") == 1
    assert gpu.waits.pop("training/trainer.py:_update", 0) == updates * training.schedule.ess_scaling
    assert not gpu.waits
    num_tokens = sum(len(sample.response_tokens) for sample in samples(5, seed=1, shared_prompt=case.shared_prompt))
    copied = gpu.copied_to_host
    assert copied.pop("training/step_report.py:report") == num_tokens * _PER_TOKEN
    assert copied.pop("training/parallel/sharding.py:sample_weights") > 0
    if training.kl.coefficient:
        # The reference's table of rotary frequencies. Its weights come from the CPU, and are not copied back.
        assert copied.pop("models/modules.py:<lambda>") < 64
    assert not copied


@pytest.mark.slow
@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("name", _IN_16_BITS)
def test_under_fsdp_in_16_bits_a_step_is_that_of_a_cpu_to_rounding(name: str) -> None:
    case = replace(CASES[name], compute_dtype="bfloat16")
    on_cpu = make_trainer(case, ALONE, "bfloat16")
    for seed in range(2):
        on_cpu.step(samples(5, seed=seed, shared_prompt=case.shared_prompt))
    with pretend_gpu() as gpu:
        trainer, num_microbatches = stepped(case, gpu)
        assert_listed(gpu, case, num_microbatches)
        result = {name: weight.cpu() for name, weight in trainer.weights().items()}
    # The CPU has no kernel for packed sequences, and the GPU computes with nothing else here.
    assert gpu.cuda_only["torch_attn._varlen_attn.default"] > 0
    # Nor one that multiplies bfloat16 to float32.
    assert gpu.cuda_only["aten.mm.dtype"] > 0
    for name, other in on_cpu.weights().items():
        assert (result[name] - other).norm() < 0.002 * other.norm()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shared_prompt", [0, 30])
def test_the_kernel_for_packed_sequences_computes_attention_of_each_sequence(
    shared_prompt: int, window: int | None
) -> None:
    [batch] = microbatches(samples(9, seed=0, shared_prompt=shared_prompt), 10_000)
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.input_ids_S), 16) for heads in (4, 2, 2)]
    halves = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    with pretend_gpu() as gpu:
        packing = batch.to(GPU)
        on_gpu = [half.detach().to(GPU).requires_grad_() for half in halves]
        attend = partial(packed_attention, torch.nn.Identity(), scaling=0.125, sliding_window=window)
        out, _ = attend(*on_gpu, None, packing=packing)
        out.float().square().sum().backward()
        grads = [one.grad.cpu() for one in on_gpu if one.grad is not None]
    assert gpu.cuda_only.total() == 2
    expected, _ = attend(*(half.float() for half in halves), None, packing=batch)
    expected.square().sum().backward()
    for result, half in zip(grads, halves, strict=True):
        assert half.grad is not None
        assert (result - half.grad).norm() < 0.02 * half.grad.norm(), "bfloat16 has 8 bits"


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_no_loss_waits_for_the_gpu(loss: str) -> None:
    case = replace(CASES["llama aipo"], training=CASES["llama aipo"].training.with_loss(loss))
    with pretend_gpu() as gpu:
        stepped(case, gpu)
    expected = {
        "training/losses/excluded.py:check_finite",
        "training/optimizer.py:clip_gradients",
        "training/parallel/sharding.py:changed_share",
        "training/step_report.py:report",
    }
    assert set(gpu.waits) == expected
