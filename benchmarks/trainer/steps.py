"""The contenders of `benchmarks.trainer`: one batch through a model, by our step and by plain transformers.

    packed    Trainer.step: packed microbatches, log π in chunks, clipped, AdamW, report
    padded    rows as they come, padded on the right to the longest of their microbatch; forward, log-softmax, backward
    sorted    the same with rows sorted by length, which saves padding

The limit of positions per microbatch is the same for all. Only `packed` steps and reports; its time includes that.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from configs.losses import AipoConfig
from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

_SEED = 0
_RHO = 4.0
_PROMPT = (32, 97)
"""Range of the number of tokens of a prompt, end exclusive."""
_SPREAD = 0.9
"""Standard deviation of the log of responses' lengths: a tenth is at least three times as long as the median."""


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """A model, a batch, and how it is split."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    dtype: str
    num_samples: int
    median_response: int
    """Tokens."""
    longest_response: int
    """Tokens; longer ones are cut, as by `max_new_tokens`."""
    max_tokens: int
    """Maximum positions of a microbatch, padding included."""
    checkpointing: bool
    """Whether all contenders compute each layer's activations again in the backward pass."""


CASES = {
    "cpu": TrainerCase(
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=1024,
        vocab_size=8192,
        dtype="float32",
        num_samples=32,
        median_response=160,
        longest_response=1024,
        max_tokens=4096,
        checkpointing=False,
    ),
    # The shape of Llama 3.2 1B: 1.24 billion parameters, the output layer is the embedding.
    "cuda": TrainerCase(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
        dtype="bfloat16",
        num_samples=256,
        median_response=512,
        longest_response=4096,
        max_tokens=8192,  # the logits of 16,384 do not fit into 80 GB in plain transformers
        checkpointing=False,
    ),
}


def make_model(case: TrainerCase, device: torch.device) -> PreTrainedModel:
    """A Llama of that shape with random weights, on `device`, with transformers' own attention."""
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        max_position_embeddings=_PROMPT[1] + case.longest_response,
        tie_word_embeddings=True,
    )
    with device:
        model: PreTrainedModel = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.to(getattr(torch, case.dtype))
    return model


def make_samples(case: TrainerCase) -> list[Sample]:
    """The batch: prompts of 32 to 96 tokens, responses whose length is log-normal."""
    random = np.random.default_rng(_SEED)
    lengths = np.exp(random.normal(np.log(case.median_response), _SPREAD, case.num_samples))
    return [
        Sample(
            prompt_tokens=random.integers(0, case.vocab_size, random.integers(*_PROMPT)).astype(np.int32),
            response_tokens=random.integers(0, case.vocab_size, length).astype(np.int32),
            rollout_logprobs=np.full(length, -np.log(case.vocab_size), dtype=np.float32),
            loss_mask=np.ones(length, dtype=np.uint8),
            temperature=1.0,
            advantage=float(random.normal()),
            staleness=0,
            max_new_tokens=case.longest_response,
        )
        for length in lengths.clip(1, case.longest_response).astype(int).tolist()
    ]


def contenders(case: TrainerCase, samples: Sequence[Sample], device: torch.device) -> dict[str, Callable[[], object]]:
    """Each call takes the whole batch once and waits for the device."""
    model = make_model(case, device)
    training = TrainingConfig(
        max_steps=1,
        loss=AipoConfig(max_importance_ratio=_RHO),
        learning_rate=1e-6,
        max_tokens_per_microbatch=case.max_tokens,
        activation_checkpointing=case.checkpointing,
        # A GPU's defaults: layers are compiled.
        device="cuda" if device.type == "cuda" else "cpu",
    )
    trainer = Trainer(deepcopy(model), training, ranks=Ranks.alone(device))
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    by_length = sorted(samples, key=lambda sample: sample.num_tokens)
    return {
        "packed": lambda: trainer.step(samples),
        "padded": lambda: plain_pass(model, samples, case.max_tokens),
        "sorted": lambda: plain_pass(model, by_length, case.max_tokens),
    }


def plain_pass(model: PreTrainedModel, samples: Sequence[Sample], max_tokens: int) -> None:
    """Forward and backward of the same loss in plain transformers."""
    model.zero_grad(set_to_none=True)
    num_tokens = sum(len(sample.response_tokens) for sample in samples)
    for rows in padded_runs(samples, max_tokens):
        _backward(model, rows, num_tokens)
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def padded_runs(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Groups neighbours as long as they fit when each is padded to the longest."""
    runs: list[list[Sample]] = []
    for sample in samples:
        together = [*runs[-1], sample] if runs else []
        if together and len(together) * max(row.num_tokens for row in together) <= max_tokens:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs


def _backward(model: PreTrainedModel, rows: Sequence[Sample], num_tokens: int) -> None:
    shape = (len(rows), max(row.num_tokens for row in rows))
    input_ids_BT, mask_BT, response_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    advantages_B1 = torch.tensor([[row.advantage] for row in rows]).to(model.device)
    rollout_BT = torch.zeros(shape)
    for b, row in enumerate(rows):
        start, end = len(row.prompt_tokens), row.num_tokens
        input_ids_BT[b, :end] = torch.from_numpy(np.concatenate([row.prompt_tokens, row.response_tokens]))
        mask_BT[b, :end] = 1
        response_BT[b, start:end] = 1
        rollout_BT[b, start:end] = torch.from_numpy(row.rollout_logprobs)
    input_ids_BT, mask_BT, response_BT, rollout_BT = (
        tensor.to(model.device) for tensor in (input_ids_BT, mask_BT, response_BT, rollout_BT)
    )
    logits_BTV = model(input_ids=input_ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, :-1].float()
    logprobs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(2, input_ids_BT[:, 1:, None]).squeeze(2)
    ratio_BT = (logprobs_BT.detach() - rollout_BT[:, 1:]).exp().clamp(max=_RHO)
    loss_BT = -ratio_BT * advantages_B1 * logprobs_BT * response_BT[:, 1:]
    torch.autograd.backward(loss_BT.sum() / num_tokens)


def model_flops(case: TrainerCase, samples: Sequence[Sample]) -> float:
    """Floating-point operations of one optimizer step on the batch: forward, and twice that backward.

    6 per weight of the layers and position; 6 per weight of the output layer and response token; causal attention:
    6 · layers · width · length² per sequence. What is computed twice to save memory counts once.
    """
    head = case.hidden_size // case.num_heads
    attention = case.hidden_size * head * (2 * case.num_heads + 2 * case.num_kv_heads)
    layers = case.num_layers * (attention + 3 * case.hidden_size * case.intermediate_size)
    # The last token of a sample is not computed.
    lengths = [sample.num_tokens - 1 for sample in samples]
    responses = sum(len(sample.response_tokens) for sample in samples)
    squares = sum(length**2 for length in lengths)
    weights = 6.0 * (layers * sum(lengths) + case.vocab_size * case.hidden_size * responses)
    return weights + 6.0 * case.num_layers * case.hidden_size * squares
