"""The trainer on a GPU: same steps as on a CPU, attention in one kernel, and memory freed by sleeping."""

import gc
from dataclasses import replace

import pytest
import torch
from support.training.sharded_trainers import CASES, make_trainer, samples

from millrace.training.attention import packed_attention
from millrace.training.packing import microbatches
from millrace.training.parallel.ranks import ALONE, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

GPU = torch.device("cuda")


@pytest.mark.parametrize("name", ["llama aipo", "qwen3 gspo", "qwen3 lora"])
def test_a_gpu_takes_the_steps_that_a_cpu_takes(name: str) -> None:
    # transformers computes norms and rotary embeddings in float32, whatever the model's dtype.
    case = replace(CASES[name], dtype=torch.float64)
    on_cpu, on_gpu = make_trainer(case, ALONE, None), make_trainer(case, Ranks.alone(GPU), None)
    start = {key: weight.clone() for key, weight in on_cpu.weights().items()}
    for number in range(3):
        batch = samples(5, seed=number)
        expected, result = on_cpu.step(batch), on_gpu.step(batch)
        assert result.measured() == pytest.approx(expected.measured(), rel=1e-5, abs=1e-7)
    weights = on_gpu.weights()
    for key, expected_weight in on_cpu.weights().items():
        assert weights[key].is_cuda
        # AdamW magnifies the rounding of gradients that are almost 0.
        error = (weights[key].cpu() - expected_weight).norm()
        assert error <= 1e-4 * (expected_weight - start[key]).norm(), key


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shared_prompt", [0, 30])
def test_one_kernel_over_all_sequences_attends_as_one_call_for_each_length_does(
    shared_prompt: int, window: int | None
) -> None:
    [batch] = microbatches(samples(9, seed=0, shared_prompt=shared_prompt), 10_000)
    assert (batch.keys_T is not None) == bool(shared_prompt)
    packing = batch.to(GPU)
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.input_ids_S), 64) for heads in (4, 2, 2)]
    halves = [torch.randn(shape, dtype=torch.bfloat16, device=GPU, requires_grad=True) for shape in shapes]
    singles = [half.detach().float().requires_grad_() for half in halves]
    # The dtype decides which one runs: flash attention has no 32-bit numbers.
    outs = [
        packed_attention(torch.nn.Identity(), *inputs, None, packing=packing, scaling=0.125, sliding_window=window)[0]
        for inputs in (halves, singles)
    ]
    towards = torch.randn_like(outs[1])
    for out in outs:
        out.backward(towards.to(out.dtype))
    grads = [(half.grad, single.grad) for half, single in zip(halves, singles, strict=True)]
    for result, expected in [tuple(outs), *grads]:
        assert result is not None
        assert expected is not None
        assert ((result - expected).norm() / expected.norm()).item() < 0.02, "bfloat16 has 8 bits"


@pytest.mark.parametrize("name", ["llama aipo", "llama aipo bfloat16", "qwen3 gspo"])
def test_a_sleeping_trainer_gives_the_gpus_memory_back_and_wakes_as_it_was(name: str) -> None:
    case = CASES[name]
    # The first step of a process allocates cuBLAS workspaces, which stay.
    make_trainer(case, Ranks.alone(GPU), case.compute_dtype).step(samples(5, seed=0))
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = make_trainer(case, Ranks.alone(GPU), case.compute_dtype)
    trainer.step(samples(5, seed=0))
    awake, state = torch.cuda.memory_allocated(), trainer.state()
    trainer.sleep()
    assert torch.cuda.memory_allocated() - before < (awake - before) / 4
    trainer.wake()
    assert trainer.state() == state
    trainer.step(samples(5, seed=1))
