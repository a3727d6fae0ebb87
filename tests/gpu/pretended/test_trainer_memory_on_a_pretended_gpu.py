"""The trainer's memory on a pretended GPU is that of docs/training.md, "Memory on a GPU", byte for byte."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.gpu.pretend_gpu import GPU, pretend_gpu
from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.logprobs import chunked_logprobs
from millrace.training.losses.forward_kl import TopTokens
from millrace.training.parallel import sharding
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, VOCAB = 64, 160, 4, 2, 37
HEAD_DIM = HIDDEN // HEADS
KEYS = KEY_HEADS * HEAD_DIM
pytestmark = pytest.mark.usefixtures("gloo")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Dtype = Literal["float32", "bfloat16"]


def model(num_layers: int, dtype: Dtype) -> LlamaForCausalLM:
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**config)).to(DTYPES[dtype])  # type: ignore[no-untyped-call,no-any-return]


def batch(num_samples: int, length: int) -> list[Sample]:
    """Samples of which `length` tokens are computed, all but the last one; half of these are the prompt."""
    random = np.random.default_rng(0)
    half = length // 2
    draws = [(random.integers(0, VOCAB, half), random.integers(0, VOCAB, half + 1)) for _ in range(num_samples)]
    return [make_sample(prompt, response, rollout_logprobs=-3.6) for prompt, response in draws]


def measure(
    dtype: Dtype, *, num_layers: int, length: int = 128, num_samples: int = 1, **settings: Any
) -> tuple[int, int, int]:
    """Parameters, bytes between two steps, and the most that a step takes in addition."""
    training = TrainingConfig.model_validate(
        {
            "max_steps": 9,
            "learning_rate": 1e-3,
            "max_tokens_per_microbatch": length,
            **settings,
        }
    )
    made, samples = model(num_layers, dtype), batch(num_samples, length)
    with pretend_gpu() as gpu:
        trainer = Trainer(made, training, ranks=Ranks.alone(GPU))
        trainer.step(samples)
        before = gpu.peak = gpu.in_use
        trainer.step(samples)
        return sum(weight.numel() for weight in trainer.weights().values()), before, gpu.peak - before


def layer_bytes(dtype: Dtype) -> int:
    """Bytes that a layer of a Llama keeps of each token for the backward pass: docs/training.md."""
    if dtype == "float32":
        return 4 * (9 * HIDDEN + 2 * KEYS + 4 * INTERMEDIATE + HEADS + 2)
    return 2 * (10 * HIDDEN + 2 * KEYS + 4 * INTERMEDIATE) + 4 * (HEADS + 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_between_steps_a_trainer_holds_weights_gradients_and_two_moments(dtype: Dtype) -> None:
    num_parameters, held, _ = measure(dtype, num_layers=1)
    rotary = HEAD_DIM // 2 * 4
    # All in float32, whatever the model is in. AdamW counts its updates in 4 bytes for each of the 11 tensors.
    assert held <= 4 * num_parameters * 4 + 2 * rotary + 11 * 4
    assert held >= 4 * num_parameters * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_offloaded_moments_take_no_memory_of_the_gpu(dtype: Dtype) -> None:
    num_parameters, held, _ = measure(dtype, num_layers=1, optimizer_offload=True)
    rotary = HEAD_DIM // 2 * 4
    assert held <= 2 * num_parameters * 4 + 2 * rotary + 11 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "length"), [("float32", 128), ("bfloat16", 256)])
def test_each_layer_keeps_as_many_bytes_of_each_token_as_the_formula_says(dtype: Dtype, length: int) -> None:
    (_, _, few), (_, _, many) = (measure(dtype, num_layers=layers, length=length) for layers in (1, 3))
    # Flash attention also keeps a random state of 16 bytes, without dropout too.
    state = 0 if dtype == "float32" else 16
    assert many - few == 2 * (length * layer_bytes(dtype) + state)


@pytest.mark.slow
def test_with_activation_checkpointing_a_layer_keeps_its_input() -> None:
    settings = {"activation_checkpointing": True}
    (_, _, few), (_, _, many) = (measure("bfloat16", num_layers=layers, **settings) for layers in (2, 4))
    assert many - few == 2 * 128 * HIDDEN * torch.bfloat16.itemsize


@pytest.mark.slow
def test_with_the_selective_one_a_layer_keeps_its_input_products_and_attention() -> None:
    settings = {"activation_checkpointing": "selective"}
    (_, _, few), (_, _, many) = (measure("bfloat16", num_layers=layers, **settings) for layers in (2, 4))
    numbers = 5 * HIDDEN + 2 * KEYS + 2 * INTERMEDIATE
    # The logarithm of a softmax's sum per head, and a random state of 16 bytes.
    assert many - few == 2 * (128 * (2 * numbers + 4 * HEADS) + 16)


def test_what_a_step_takes_is_that_of_one_microbatch_however_many_there_are() -> None:
    (_, _, one), (_, _, four) = (measure("bfloat16", num_layers=1, num_samples=count) for count in (1, 4))
    # A table of 9 columns of 8 bytes for the tokens of the batch, and which microbatch of ints comes next.
    assert four - one <= 4 * 64 * 9 * 8 + 4 * 128 * 100
    assert four - one < 128 * layer_bytes("bfloat16")


def test_the_update_needs_no_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # The copy from which the changed share is measured is as large as a small model.
    monkeypatch.setattr(sharding, "_SAMPLE", 100)
    # With two tokens there are hardly any activations.
    num_parameters, _, taken = measure("float32", num_layers=2, length=2)
    # In the backward pass one gradient at a time exists twice.
    assert taken < num_parameters * 4 / 4


@pytest.mark.parametrize("with_forward_kl", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_take_three_float32_matrices_of_one_chunk(
    dtype: Dtype, with_entropy: bool, with_forward_kl: bool
) -> None:
    num_tokens, chunk, vocab = 64, 16, 4000
    hidden, weight = torch.randn(num_tokens, 8, dtype=DTYPES[dtype]), torch.randn(vocab, 8, dtype=DTYPES[dtype])
    with pretend_gpu() as gpu:
        leaves = [tensor.to(GPU).requires_grad_() for tensor in (hidden, weight)]
        targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64).to(GPU), torch.ones(num_tokens).to(GPU)
        top_tokens = torch.arange(10).expand(num_tokens, 10).contiguous().to(GPU)
        top = TopTokens(top_tokens, torch.full((num_tokens, 10), -3.0).to(GPU)) if with_forward_kl else None
        before = gpu.peak = gpu.in_use
        logprobs, entropy, forward_kl = chunked_logprobs(
            *leaves, None, targets, temperatures, teacher_top=top, chunk=chunk
        )
        total = logprobs + entropy if with_entropy else logprobs
        (total if forward_kl is None else total + forward_kl).sum().backward()
        matrix, gradient = chunk * vocab * 4, vocab * 8 * 4
        assert gpu.peak - before <= 3 * matrix + 2 * gradient + (50 + 40 * with_forward_kl) * num_tokens
