"""A teacher's log-probabilities: those of the trainer's forward pass, whatever its vocabulary is padded with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.training.packing import pack
from millrace.training.policy import PackedPolicy
from millrace.training.teacher import Teacher

SAMPLES = [
    make_sample([1, 5], [4, 7, 3], temperature=0.7),
    make_sample([1, 5], [6], temperature=0.7),
    make_sample([2], [3, 4], kept_tokens=np.array([3, 8, 4]), kept_counts=np.array([2, 1])),
]


def teacher(model: LlamaForCausalLM, num_ids: int) -> Teacher:
    return Teacher(model, num_ids=num_ids, max_tokens=64)


def test_it_computes_what_the_trainer_would(
    make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = PackedPolicy(make_model(3))
    found = teacher(make_model(3), len(tokenizer)).logprobs(SAMPLES)
    for sample, logprobs in zip(SAMPLES, found, strict=True):
        assert logprobs == pytest.approx(policy(pack(sample))[0].detach().numpy(), abs=1e-6)
    assert teacher(make_model(3), len(tokenizer)).logprobs([]) == []


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_has_no_share(tied: bool) -> None:
    config: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "tie_word_embeddings": tied}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=10, **config))
    padded = LlamaForCausalLM(LlamaConfig(vocab_size=16, **config))
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            target = padded.state_dict()[name]
            target[: len(tensor)] = tensor
    found, expected = teacher(padded, 10).logprobs(SAMPLES), teacher(plain, 10).logprobs(SAMPLES)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_token_beyond_the_tokenizers_is_unknown(make_model: Callable[..., LlamaForCausalLM]) -> None:
    of_digits = teacher(make_model(3), 8)
    assert [of_digits.unknown_id(sample) for sample in SAMPLES] == [None, None, 8]
