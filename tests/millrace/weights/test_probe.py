"""The cache-validity probe: its tokens, the comparison of two answers, and the tolerance for rounding."""

import math
from copy import deepcopy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millrace.weights.base import Probe
from millrace.weights.probe import (
    MOST_TOKENS,
    NUM_LOGPROBS,
    alarm,
    divergence,
    largest_difference,
    probe_tokens,
    tolerance_between,
)


def test_the_probe_repeats_the_prompt_to_the_length_of_a_trajectory() -> None:
    assert probe_tokens([1, 5, 6], max_new_tokens=6) == (1, 5, 6, 1, 5, 6, 1, 5)
    assert probe_tokens((1, 5, 6), max_new_tokens=1) == (1, 5, 6)


@pytest.mark.parametrize("prompt_length", [1, 7, 255, 256, 257, 1000])
def test_a_probe_has_at_most_256_tokens(prompt_length: int) -> None:
    tokens = probe_tokens(range(prompt_length), max_new_tokens=10_000)
    assert len(tokens) == MOST_TOKENS == 256
    assert tokens[: min(prompt_length, 256)] == tuple(range(min(prompt_length, 256)))


def test_the_largest_difference_is_named_with_its_token_and_both_numbers() -> None:
    expected = Probe(tokens=(1,), logprobs={3: -0.5, 4: -1.5, 5: -2.0})
    difference, numbers = largest_difference(expected, {3: -0.51, 4: -1.25, 5: -2.0})
    assert difference == pytest.approx(0.25)
    assert all(part in numbers for part in ("token 4", "-1.25000", "-1.50000"))


def test_only_common_tokens_are_compared() -> None:
    expected = Probe(tokens=(1,), logprobs={3: -0.5, 4: -9.0})
    assert largest_difference(expected, {3: -0.5, 7: -8.9})[0] == 0.0


def test_no_common_token_is_an_infinite_difference() -> None:
    expected = Probe(tokens=(1,), logprobs={4: -0.5, 3: -0.7})
    difference, numbers = largest_difference(expected, {8: -0.5, 7: -0.7})
    assert difference == math.inf
    assert "[7, 8] against [3, 4]" in numbers


@pytest.mark.parametrize(
    ("trainer", "generator", "tolerance"),
    [
        ("float32", "float32", 1e-3),
        ("bfloat16", "bfloat16", None),
        ("float32", "bfloat16", None),
        ("bfloat16", "float32", None),
    ],
)
def test_log_probabilities_are_compared_only_in_float32(trainer: str, generator: str, tolerance: float | None) -> None:
    assert tolerance_between(trainer, generator) == tolerance


def test_the_divergence_is_half_of_the_kl_in_both_directions() -> None:
    p_probs, q_probs = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    there_and_back = sum(p * math.log(p / q) + q * math.log(q / p) for p, q in zip(p_probs, q_probs, strict=True))
    expected = Probe(tokens=(1,), logprobs={token: math.log(p) for token, p in enumerate(p_probs)})
    logprobs = {token: math.log(q) for token, q in enumerate(q_probs)}
    assert divergence(expected, logprobs) == pytest.approx(there_and_back / 2)
    assert divergence(expected, {7: -1.0}) == math.inf


def test_with_a_tolerance_one_number_beyond_it_is_an_alarm() -> None:
    expected = Probe(tokens=(1,), logprobs={3: -0.001, 4: -9.0})
    logprobs = {3: -0.001, 4: -9.2}
    assert alarm(expected, logprobs, 0.3) is None
    assert "0.2 nats" in (alarm(expected, logprobs, 0.1) or "")


class PretrainedSize:
    """A random model whose logits are as large as those of a pretrained one: the largest is about 20."""

    def __init__(self) -> None:
        config = LlamaConfig(
            vocab_size=5000,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.1)
            self.model.lm_head.weight.normal_(0.0, 0.7)

    @torch.no_grad()
    def next_logprobs(self, tokens: tuple[int, ...], dtype: torch.dtype) -> dict[int, float]:
        model = deepcopy(self.model).to(dtype)
        best = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).topk(NUM_LOGPROBS)
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_rounding_to_bfloat16_is_not_an_alarm_and_other_weights_are() -> None:
    of = PretrainedSize()
    texts = [tuple(range(start, start + 20)) for start in range(0, 400, 20)]
    probes = {text: Probe(tokens=text, logprobs=of.next_logprobs(text, torch.float32)) for text in texts}
    rounded = {text: of.next_logprobs(text, torch.bfloat16) for text in texts}
    assert max(largest_difference(probes[text], rounded[text])[0] for text in texts) > 0.1
    assert [alarm(probes[text], rounded[text], None) for text in texts] == [None] * len(texts)
    with torch.no_grad():
        # A generator that kept an older copy of its output layer.
        of.model.lm_head.weight += 0.3 * torch.randn_like(of.model.lm_head.weight)
    alarms = [alarm(probes[text], of.next_logprobs(text, torch.bfloat16), None) for text in texts]
    # Not for every text: a token that is all but certain stays so.
    assert sum(sentence is not None for sentence in alarms) > len(texts) / 2
