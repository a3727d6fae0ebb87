"""The packed policy: what it thinks of a response is what the model thinks of that sequence alone, of any kind."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engines.one_by_one import response_logprobs, taken
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
    """With weights large enough for it to have opinions."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            # What is drawn anew with each model has to go; biases and norms only have to be other than 0 and 1.
            parameter.mul_(parameter.dim() == 1).add_(drawn, alpha=0.2)
    return model.to(dtype)


def sample(prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Sample:
    return Sample(
        prompt_tokens=np.array(prompt, dtype=np.int32),
        response_tokens=np.array(response, dtype=np.int32),
        rollout_logprobs=np.full(len(response), -1.0, dtype=np.float32),
        loss_mask=np.ones(len(response), dtype=np.uint8),
        temperature=temperature,
        advantage=1.0,
        staleness=0,
    )


def mixed() -> list[Sample]:
    """Of several lengths, some of them equal; temperatures that float32 holds exactly."""
    random = np.random.default_rng(0)
    shapes = [(3, 4), (1, 1), (5, 2), (2, 5), (4, 3), (1, 9), (6, 1)]
    return [
        sample(random.integers(1, 40, p), random.integers(1, 40, r), temperature)
        for (p, r), temperature in zip(shapes, (1.0, 0.5, 2.0, 1.0, 0.75, 1.0, 1.5), strict=True)
    ]


def truncated(one: Sample, seed: int) -> Sample:
    """The sample as if each of its tokens had been drawn from a few; every third from the whole vocabulary."""
    random = np.random.default_rng(seed)
    others = [random.choice(40, random.integers(1, 8), replace=False) for _ in one.response_tokens]
    kept = [
        np.union1d(ids, token) if r % 3 != 2 else np.zeros(0)
        for r, (ids, token) in enumerate(zip(others, one.response_tokens, strict=True))
    ]
    return replace(
        one,
        kept_tokens=np.concatenate(kept).astype(np.int32),
        kept_counts=np.array([len(ids) for ids in kept], np.int32),
    )


def mixed_and_truncated() -> list[Sample]:
    """Every second response was drawn from few tokens."""
    return [truncated(one, number) if number % 2 else one for number, one in enumerate(mixed())]


def flat(batches: Sequence[Microbatch], each: Callable[[Microbatch], torch.Tensor], size: int) -> torch.Tensor:
    """What `each` gives of each microbatch, in the order of the batch."""
    found = torch.zeros(size, dtype=torch.float64)
    for batch in batches:
        found[batch.in_batch_N] = each(batch).double()
    return found


@kinds
@pytest.mark.parametrize("make_samples", [mixed, mixed_and_truncated])
@pytest.mark.parametrize(("max_tokens", "num_ranks"), [(1, 1), (12, 1), (20, 3), (1000, 1), (1000, 9)])
def test_log_pi_is_that_of_each_sequence_alone_however_they_are_packed(
    config: PreTrainedConfig, max_tokens: int, num_ranks: int, make_samples: Callable[[], list[Sample]]
) -> None:
    model, samples = model_of(config), make_samples()
    policy = PackedPolicy(deepcopy(model))
    with torch.no_grad():
        expected = [response_logprobs(model, one) for one in samples]
        batches = microbatches(samples, max_tokens, num_ranks)
        logprobs = flat(batches, lambda batch: policy(batch).logprobs_N, 25)
        entropy = flat(batches, lambda batch: policy(batch).entropy_N, 25)
    chosen = torch.cat([taken(one, of) for one, of in zip(expected, samples, strict=True)])
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
    sum(taken(response_logprobs(model, one), one).sum() for one in samples).backward()  # type: ignore[union-attr]
    for batch in microbatches(samples, 20, 3):
        policy(batch).logprobs_N.sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), policy.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-10, msg=name)


@kinds
def test_over_the_vocabulary_it_is_the_model_itself(config: PreTrainedConfig) -> None:
    model, one = model_of(config), sample([1, 2, 3], [4, 5], temperature=0.5)
    policy = PackedPolicy(deepcopy(model))
    expected = response_logprobs(model, one)
    torch.testing.assert_close(policy.over_vocabulary(pack(one)), expected, rtol=0, atol=1e-11)
    assert not policy.over_vocabulary(pack(one)).requires_grad


def test_progress_is_told_of_at_each_layer_and_at_each_chunk_of_the_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 40)
    policy = PackedPolicy(model_of(CONFIGS["llama"]))
    told: list[None] = []
    policy.on_progress = lambda: told.append(None)
    (batch,) = microbatches(mixed(), 1000, 1)
    found = policy(batch)
    assert len(told) == 2 + 25, "two layers, and a chunk for each of 25 tokens"
    found.logprobs_N.sum().backward()
    assert len(told) == 2 * (2 + 25)


def test_no_token_sees_one_of_another_sequence() -> None:
    policy = PackedPolicy(model_of(CONFIGS["qwen3"]))
    samples, other = mixed(), mixed()
    other[2].prompt_tokens[:] = 7
    with torch.no_grad():
        before, after = (
            flat(microbatches(them, 1000), lambda batch: policy(batch).logprobs_N, 25) for them in (samples, other)
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
        found = half(batch)
        assert found.logprobs_N.dtype == found.entropy_N.dtype == torch.float32
        apart = flat([batch], lambda one: half(one).logprobs_N - exact(one).logprobs_N, size)
    assert 0 < apart.abs().mean() < 0.1


def test_an_idle_rank_goes_through_every_layer_and_adds_nothing() -> None:
    policy = PackedPolicy(model_of(CONFIGS["llama"]))
    *_, idle = microbatches(mixed()[:1], 1000, num_ranks=2)
    found = policy(idle)
    assert len(found.logprobs_N) == 0
    found.logprobs_N.sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_model_whose_logits_would_come_out_wrong_is_refused() -> None:
    with pytest.raises(InputError, match=r"^a cohere model can't be trained; expected one of llama, "):
        PackedPolicy(AutoModelForCausalLM.from_config(CohereConfig(**SMALL)))


def test_attention_dropout_is_left_out_so_that_pi_is_the_same_in_each_pass() -> None:
    policy = PackedPolicy(model_of(LlamaConfig(**SMALL, attention_dropout=0.5)).train())
    assert policy.model.config._attn_implementation == PACKED
    batch = pack(mixed()[0])
    assert torch.equal(policy(batch).logprobs_N, policy(batch).logprobs_N)
