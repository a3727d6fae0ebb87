"""How vLLM is started and asked, and how it says which tokens it could draw from: as masks, or as log-probabilities."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.generation import RESERVED
from millrace.generation.engines.vllm.startup import vllm_arguments
from millrace.types import Response, Sampling

INF = math.inf


def arguments(user: dict[str, Any] | None = None, **options: bool) -> dict[str, Any]:
    return vllm_arguments(Path("/policy"), dtype="float32", engine_args=user or {}, **options)


def test_the_users_arguments_come_with_what_millrace_rests_on() -> None:
    result = arguments({"max_num_seqs": 7, **dict.fromkeys(RESERVED)})
    expected = {
        "model": "/policy",
        "dtype": "float32",
        "max_num_seqs": 7,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "enable_sleep_mode": False,
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": "millrace"},
    }
    assert result.items() >= expected.items()
    assert arguments(sleeps=True)["enable_sleep_mode"] is True


def test_kept_tokens_come_as_masks_on_a_gpu_and_as_log_probabilities_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {}
    for devices in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        for truncates in (False, True):
            result = arguments({"max_logprobs": 5}, truncates=truncates)
            settings[devices, truncates] = (result["return_sampling_mask"], result["max_logprobs"])
    assert settings == {(0, False): (False, 5), (0, True): (False, -1), (1, False): (False, 5), (1, True): (True, 5)}


def test_on_a_cpu_prompts_are_computed_in_one_piece_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arguments()["enable_chunked_prefill"] is False
    assert arguments({"enable_chunked_prefill": True})["enable_chunked_prefill"] is True


def completion(*, mask: list[list[int]] | None = None, logprobs: list[dict[int, float]] | None = None) -> Any:
    """The result of vLLM for a request with two tokens, 5 and 7; `logprobs` are those of the likeliest tokens."""
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    for sampled, of_token in zip(({5: -0.5}, {7: -0.25}), logprobs or ({}, {}), strict=True):
        ids, values = ([*first, *rest] for first, rest in ((sampled, of_token), (sampled.values(), of_token.values())))
        flat.append_fast(ids, values, range(len(ids)), [None] * len(ids))
    return SimpleNamespace(
        token_ids=[5, 7],
        sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask),
        logprobs=flat,
        weight_versions=[SimpleNamespace(version="3", start=0)],
        finish_reason="length",
    )


class Idle:
    """An engine that was never started: how it asks and how it reads answers needs no processes."""

    def __new__(cls, *, returns_masks: bool) -> Any:
        from millrace.generation.engines.vllm.engine import VllmEngine

        engine = VllmEngine.__new__(VllmEngine)
        engine._returns_masks, engine.vocab_size, engine._ends = returns_masks, 40, [2]
        return engine


@pytest.mark.vllm
@pytest.mark.parametrize("mask", [[[5, 1], [7]], None])
def test_a_truncated_response_has_its_kept_tokens_however_they_came(mask: list[list[int]] | None) -> None:
    logprobs = None if mask else [{5: -0.5, 1: -1.0, 2: -INF}, {7: -0.25, 5: -INF}]
    response = Idle(returns_masks=mask is not None)._response(completion(mask=mask, logprobs=logprobs), truncated=True)
    assert response == Response(
        tokens=(5, 7),
        rollout_logprobs=(-0.5, -0.25),
        version_spans=((3, 0),),
        finish_reason="length",
        kept_tokens=(5, 1, 7),
        kept_counts=(2, 1),
    )
    whole = Idle(returns_masks=True)._response(completion(mask=[[5, 1], [7]]), truncated=False)
    assert whole.kept_tokens == whole.kept_counts == ()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("returns_masks", "temperature", "top_p", "top_k", "expected"),
    [
        # (temperature, top_p, top_k, logprobs) of vLLM's parameters: with masks it needs a top_k and a temperature.
        (True, 0.7, 0.9, None, (0.7, 0.9, 40, 0)),
        (True, 0.7, 0.9, 5, (0.7, 0.9, 5, 0)),
        (True, 0.0, 1.0, None, (1.0, 1.0, 1, 0)),
        (True, 1.0, 1.0, None, (1.0, 1.0, 40, 0)),
        (False, 0.7, 0.9, None, (0.7, 0.9, 0, -1)),
        (False, 0.7, 1.0, 5, (0.7, 1.0, 5, -1)),
        (False, 0.7, 1.0, None, (0.7, 1.0, 0, 0)),
        (False, 0.0, 1.0, 5, (0.0, 1.0, 0, 0)),
    ],
)
def test_what_is_asked_of_vllm_keeps_the_distribution(
    returns_masks: bool, temperature: float, top_p: float, top_k: int | None, expected: tuple[float, ...]
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=4)
    result = Idle(returns_masks=returns_masks)._parameters(sampling, seed=0, logprobs=0)
    assert (result.temperature, result.top_p, result.top_k, result.logprobs) == expected
    assert result.repetition_penalty == 1.0
    assert (result.min_p, result.presence_penalty, result.frequency_penalty) == (0.0, 0.0, 0.0)


@pytest.mark.vllm
def test_every_request_ends_where_its_sampling_says() -> None:
    plain = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)
    own = replace(plain, stop=("=", "12"), stop_token_ids=(7, 8))
    results = [Idle(returns_masks=False)._parameters(sampling, seed=0, logprobs=0) for sampling in (plain, own)]
    assert [result.stop_token_ids for result in results] == [[2], [7, 8]]
    assert [(result.stop, result.detokenize) for result in results] == [([], False), (["=", "12"], True)]


@pytest.mark.vllm
def test_the_sampler_leaves_out_log_probabilities_of_minus_infinity() -> None:
    from vllm.v1.sample.sampler import Sampler

    from millrace.generation.engines.vllm.plugin import omit_impossible_tokens

    previous = Sampler.gather_logprobs
    logprobs_BV = torch.log(torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0], [0.25, 0.25, 0.0, 0.5, 0.0]]))
    sampled_B = torch.tensor([2, 3])
    try:
        for _ in range(2):
            omit_impossible_tokens()
        result = Sampler.gather_logprobs(logprobs_BV, 5, sampled_B)
        few = Sampler.gather_logprobs(logprobs_BV, 1, sampled_B)
    finally:
        Sampler.gather_logprobs = staticmethod(previous)
    # The one that was sampled comes first, then as many as any row has.
    assert result.logprob_token_ids.shape == result.logprobs.shape == (2, 4)
    assert few.logprobs.shape == (2, 2)
    assert set(result.logprob_token_ids[0, 1:3].tolist()) == {0, 2}
    assert set(result.logprob_token_ids[1, 1:].tolist()) == {0, 1, 3}
    assert result.logprobs[0].tolist() == pytest.approx([math.log(0.5)] * 3 + [-INF])
