"""The packed policy: log π of each response is that of the model on the sequence alone."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engines.one_by_one import response_logprobs, taken
from support.training.samples import make_sample
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from millrace.errors import InputError
from millrace.training.attention import PACKED
from millrace.training.batch import Microbatch, Sample
from millrace.training.logprobs import CHUNK_ELEMENTS
from millrace.training.packing import microbatches, pack
from millrace.training.policy import PackedPolicy

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama with tied embeddings": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
}
kinds = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose weights are large enough for clear preferences."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            # Matrices are replaced, being random in each model; biases and norms only have to differ from 0 and 1.
            parameter.mul_(parameter.dim() == 1).add_(drawn, alpha=0.2)
    return model.to(dtype)


def mixed() -> list[Sample]:
    """Samples of several lengths, some of them equal; temperatures that float32 holds exactly."""
    random = np.random.default_rng(0)
    shapes = [(3, 4), (1, 1), (5, 2), (2, 5), (4, 3), (1, 9), (6, 1)]
    return [
        make_sample(random.integers(1, 40, p), random.integers(1, 40, r), rollout_logprobs=-1, temperature=temperature)
        for (p, r), temperature in zip(shapes, (1.0, 0.5, 2.0, 1.0, 0.75, 1.0, 1.5), strict=True)
    ]


def truncated(item: Sample, seed: int) -> Sample:
    """The sample as if each of its tokens had been drawn from a few; every third from the whole vocabulary."""
    random = np.random.default_rng(seed)
    others = [random.choice(40, random.integers(1, 8), replace=False) for _ in item.response_tokens]
    kept = [
        np.union1d(ids, token) if r % 3 != 2 else np.zeros(0)
        for r, (ids, token) in enumerate(zip(others, item.response_tokens, strict=True))
    ]
    return replace(
        item,
        kept_tokens=np.concatenate(kept).astype(np.int32),
        kept_counts=np.array([len(ids) for ids in kept], np.int32),
    )


def mixed_and_truncated() -> list[Sample]:
    """Every second response was drawn from few tokens."""
    return [truncated(item, number) if number % 2 else item for number, item in enumerate(mixed())]


def flat(batches: Sequence[Microbatch], each: Callable[[Microbatch], torch.Tensor], size: int) -> torch.Tensor:
    """The values of `each` microbatch, in the order of the batch."""
    result = torch.zeros(size, dtype=torch.float64)
    for batch in batches:
        result[batch.in_batch_N] = each(batch).double()
    return result


@kinds
@pytest.mark.parametrize("make_samples", [mixed, mixed_and_truncated])
@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(1, 1), (12, 1), (20, 3), (1000, 1), (1000, 9)])
def test_log_pi_is_that_of_each_sequence_alone_however_they_are_packed(
    config: PreTrainedConfig, max_tokens: int, num_ranks: int, make_samples: Callable[[], list[Sample]]
) -> None:
    model, samples = model_of(config), make_samples()
    policy = PackedPolicy(deepcopy(model))
    with torch.no_grad():
        expected = [response_logprobs(model, item) for item in samples]
        batches = microbatches(samples, max_tokens, num_ranks)
        logprobs = flat(batches, lambda batch: policy(batch)[0], 25)
        entropy = flat(batches, lambda batch: policy(batch)[1], 25)
    chosen = torch.cat([taken(item, of) for item, of in zip(expected, samples, strict=True)])
    torch.testing.assert_close(logprobs, chosen, rtol=0, atol=1e-11)
    torch.testing.assert_close(entropy, torch.special.entr(torch.cat(expected).exp()).sum(-1), rtol=0, atol=1e-11)


@kinds
@pytest.mark.parametrize("make_samples", [mixed, mixed_and_truncated])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_the_sequences_alone(
    config: PreTrainedConfig, checkpointing: bool, make_samples: Callable[[], list[Sample]]
) -> None:
    model, samples = model_of(config), make_samples()
    policy = PackedPolicy(deepcopy(model).train())
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sum(taken(response_logprobs(model, item), item).sum() for item in samples).backward()  # type: ignore[union-attr]
    for batch in microbatches(samples, 20, 3):
        policy(batch)[0].sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), policy.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-10, msg=name)


@kinds
def test_over_the_vocabulary_it_is_the_model_itself(config: PreTrainedConfig) -> None:
    model, item = model_of(config), make_sample([1, 2, 3], [4, 5], temperature=0.5)
    policy = PackedPolicy(deepcopy(model))
    expected = response_logprobs(model, item)
    torch.testing.assert_close(policy.over_vocabulary(pack(item)), expected, rtol=0, atol=1e-11)
    assert not policy.over_vocabulary(pack(item)).requires_grad


def test_progress_is_told_of_at_each_layer_and_at_each_chunk_of_the_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 40)
    policy = PackedPolicy(model_of(CONFIGS["llama"]))
    progress: list[None] = []
    policy.on_progress = lambda: progress.append(None)
    (batch,) = microbatches(mixed(), 1000, 1)
    logprobs_N, *_ = policy(batch)
    assert len(progress) == 2 + 25, "two layers, and a chunk for each of 25 tokens"
    logprobs_N.sum().backward()
    assert len(progress) == 2 * (2 + 25)


def test_no_token_sees_one_of_another_sequence() -> None:
    policy = PackedPolicy(model_of(CONFIGS["qwen3"]))
    samples, other = mixed(), mixed()
    other[2].prompt_tokens[:] = 7
    with torch.no_grad():
        before, after = (
            flat(microbatches(them, 1000), lambda batch: policy(batch)[0], 25) for them in (samples, other)
        )
    ours = torch.zeros(25, dtype=torch.bool)
    ours[5:7] = True
    assert torch.equal(before[~ours], after[~ours])
    assert not torch.isclose(before[ours], after[ours]).any()


def test_in_half_precision_log_pi_is_float32_and_near_the_exact_one() -> None:
    samples, size = mixed(), 25
    exact, half = (PackedPolicy(model_of(CONFIGS["llama"], dtype)) for dtype in (torch.float64, torch.bfloat16))
    with torch.no_grad():
        (batch,) = microbatches(samples, 1000)
        assert [values_N.dtype for values_N in half(batch)[:2]] == [torch.float32] * 2
        apart = flat([batch], lambda item: half(item)[0] - exact(item)[0], size)
    assert 0 < apart.abs().mean() < 0.1


def test_an_idle_rank_goes_through_every_layer_and_adds_nothing() -> None:
    policy = PackedPolicy(model_of(CONFIGS["llama"]))
    *_, idle = microbatches(mixed()[:1], 1000, num_ranks=2)
    logprobs_N, *_ = policy(idle)
    assert len(logprobs_N) == 0
    logprobs_N.sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_model_whose_logits_would_come_out_wrong_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        PackedPolicy(AutoModelForCausalLM.from_config(CohereConfig(**SMALL)))
    assert "cohere" in refused.value.read


def test_attention_dropout_is_left_out_so_that_pi_is_the_same_in_each_pass() -> None:
    policy = PackedPolicy(model_of(LlamaConfig(**SMALL, attention_dropout=0.5)).train())
    assert policy.model.config._attn_implementation == PACKED
    batch = pack(mixed()[0])
    assert torch.equal(policy(batch)[0], policy(batch)[0])
