"""Rows that come and go at every token have the logits of their own text alone."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace.generation.engines.kv_rows import KvRows

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_OF_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", _LLAMA),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": None}),
    "windows": ("mistral", {**_LLAMA, "sliding_window": 5}),
    "some windows": ("gemma3_text", {**_LLAMA, "sliding_window": 5, "layer_types": _OF_TWO_KINDS}),
    "learnt positions": ("gpt2", _GPT),
}


def make(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model in float64, whose weights are large enough for it to have opinions."""
    model_type, values = MODELS.get(kind, (kind, {}))
    config = AutoConfig.for_model(
        model_type, vocab_size=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**values, **changes}
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).double().eval()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3, generator=numbers)
    return model


def some_text(numbers: random.Random, longest: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(3, 20) for _ in range(numbers.randint(1, longest)))


def alone(model: PreTrainedModel, text: tuple[int, ...]) -> torch.Tensor:
    logits_V: torch.Tensor = model(input_ids=torch.tensor([text])).logits[0, -1]
    return logits_V


def largest_difference(model: PreTrainedModel, texts: list[tuple[int, ...]], logits_BV: torch.Tensor) -> float:
    expected_BV = torch.stack([alone(model, text) for text in texts])
    return (logits_BV - expected_BV).abs().max().item()


@torch.inference_mode()
def worst_of_a_storm(model: PreTrainedModel, num_tokens: int, seed: int, check_every: int = 1) -> float:
    """Rows enter, in twos of the same text too, get tokens, and leave, all at random."""
    numbers, cache, texts, worst = random.Random(seed), KvRows(model), [], 0.0
    for step in range(num_tokens):
        logits = []
        if texts:
            new = [numbers.randrange(3, 20) for _ in texts]
            texts = [(*text, token) for text, token in zip(texts, new, strict=True)]
            logits.append(cache.decode(new))
        if not texts or numbers.random() < 0.3:
            entering = [some_text(numbers, longest=numbers.choice([3, 16, 70])) for _ in range(numbers.randint(1, 3))]
            entering.append(entering[0])
            texts += entering
            logits.append(cache.append(entering))
        if step % check_every == 0:
            worst = max(worst, largest_difference(model, texts, torch.cat(logits)))
        leaving = [row for row in range(len(texts)) if numbers.random() < 0.1 or len(texts[row]) > 120]
        texts = [texts[row] for row in cache.remove(leaving)]
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_rows_that_come_and_go_at_every_token_have_the_logits_of_their_own_text(kind: str) -> None:
    assert worst_of_a_storm(make(kind), num_tokens=20, seed=1) < 1e-12


@pytest.mark.parametrize("seed", [2, 3])
def test_they_do_when_the_columns_were_used_up_again_and_again(seed: int) -> None:
    model = make("llama", num_hidden_layers=1)
    assert worst_of_a_storm(model, num_tokens=300, seed=seed, check_every=15) < 1e-12


@torch.inference_mode()
def test_a_text_that_several_rows_share_is_computed_once() -> None:
    model = make("llama")
    passes: list[torch.Size] = []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: passes.append(inputs[0].shape))
    KvRows(model).append([(4, 5, 6), (7, 8), (4, 5, 6), (4, 5, 6)])
    assert passes == [torch.Size([2, 3])]


@torch.inference_mode()
def test_many_long_texts_enter_in_several_passes_with_texts_of_like_length_together() -> None:
    model = make("llama", num_hidden_layers=1, max_position_embeddings=6000)
    lengths: list[tuple[int, int]] = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: lengths.append((inputs[0].shape[0], inputs[0].shape[1]))
    )
    texts = [(3,) * 10, (4,) * 5000, (5,) * 11, (6,) * 4000, (7,) * 9]
    logits_BV = KvRows(model).append(texts)
    assert lengths == [(3, 11), (1, 4000), (1, 5000)]
    assert largest_difference(model, texts, logits_BV) < 1e-12


@torch.inference_mode()
def test_a_row_that_leaves_is_not_computed_any_more_nor_are_its_columns() -> None:
    model = make("llama")
    passes: list[tuple[int, int]] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, inputs, named: passes.append(
            (len(named["hidden_states"]), named["past_key_values"].get_seq_length())
        ),
        with_kwargs=True,
    )
    cache = KvRows(model)
    cache.append([(3,) * 50, (4,), (5, 6)])
    assert cache.remove([0]) == [2, 1]
    cache.decode([7, 8])
    assert cache.remove([1]) == [0]
    cache.decode([9])
    assert passes == [(3, 0), (2, 2), (1, 3)]


@torch.inference_mode()
def test_a_batch_that_was_empty_in_between_gives_the_same_bits_as_a_new_one() -> None:
    model = make("llama").float()
    texts = [some_text(random.Random(i), 20) for i in range(7)]
    cache = KvRows(model)

    def played() -> list[torch.Tensor]:
        return [cache.append(texts), *(cache.decode([3 + i] * 7) for i in range(5))]

    first = played()
    cache.append([(5,) * 90])
    cache.remove(range(8))
    for previous, after in zip(first, played(), strict=True):
        assert torch.equal(previous, after)


@torch.inference_mode()
def test_what_broken_weights_left_in_the_buffers_does_not_reach_later_rows() -> None:
    model = make("llama")
    embedding = model.get_input_embeddings().weight
    whole = embedding.clone()
    cache = KvRows(model)
    embedding.fill_(torch.nan)
    assert cache.append([(4,) * 40] * 6).isnan().all()
    embedding.copy_(whole)
    cache.clear()
    texts = [(5, 6), (7,) * 30, (8, 9, 10)]
    logits = [cache.append(texts[:1]), cache.append(texts[1:])]
    assert largest_difference(model, texts, torch.cat(logits)) < 1e-12
    assert largest_difference(model, [(*text, 3) for text in texts], cache.decode([3, 3, 3])) < 1e-12
