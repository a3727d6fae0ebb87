"""How vLLM says which tokens it could draw from: as masks, or as the log-probabilities that are not minus infinity."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.generation.engines.vllm.kept_tokens import kept_tokens, leave_out_the_impossible
from millrace.types import Response, Sampling

pytestmark = pytest.mark.vllm

INF = math.inf


def completion(*, mask: list[list[int]] | None = None, logprobs: list[dict[int, float]] | None = None) -> Any:
    """What vLLM returns of a request with two tokens, 5 and 7."""
    return SimpleNamespace(
        token_ids=[5, 7],
        sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask),
        logprobs=[
            {token: SimpleNamespace(logprob=value) for token, value in of_token.items()}
            for of_token in logprobs or [{5: -0.5}, {7: -0.25}]
        ],
        weight_versions=[SimpleNamespace(version="3", start=0)],
        finish_reason="length",
    )


def test_a_mask_is_taken_as_it_is() -> None:
    assert kept_tokens(completion(mask=[[5, 1], [7]])) == [[5, 1], [7]]


def test_without_a_mask_a_token_is_kept_if_it_could_be_drawn() -> None:
    logprobs = [{5: -0.5, 1: -1.0, 2: -INF}, {7: 0.0, 5: -INF, 1: -INF}]
    assert kept_tokens(completion(logprobs=logprobs)) == [[5, 1], [7]]


class Idle:
    """An engine that was never started: how it asks and how it reads answers needs no processes."""

    def __new__(cls, *, returns_masks: bool) -> Any:
        from millrace.generation.engines.vllm.engine import VllmEngine

        engine = VllmEngine.__new__(VllmEngine)
        engine._returns_masks, engine.vocab_size, engine._ends, engine._stop = returns_masks, 40, [2], []
        return engine


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


def test_a_response_that_was_not_truncated_names_none() -> None:
    response = Idle(returns_masks=True)._response(completion(mask=[[5, 1], [7]]), truncated=False)
    assert response.kept_tokens == response.kept_counts == ()


@pytest.mark.parametrize(
    ("returns_masks", "temperature", "top_p", "top_k", "asked"),
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
    returns_masks: bool, temperature: float, top_p: float, top_k: int | None, asked: tuple[float, ...]
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=4)
    found = Idle(returns_masks=returns_masks)._parameters(sampling, seed=0, logprobs=0)
    assert (found.temperature, found.top_p, found.top_k, found.logprobs) == asked
    assert found.repetition_penalty == 1.0
    assert (found.min_p, found.presence_penalty, found.frequency_penalty) == (0.0, 0.0, 0.0)


def test_asked_for_all_log_probabilities_the_sampler_leaves_out_those_of_minus_infinity() -> None:
    from vllm.v1.sample.sampler import Sampler

    before = Sampler.gather_logprobs
    logprobs_BV = torch.log(torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0], [0.25, 0.25, 0.0, 0.5, 0.0]]))
    sampled_B = torch.tensor([2, 3])
    try:
        for _ in range(2):
            leave_out_the_impossible()
        found = Sampler.gather_logprobs(logprobs_BV, 5, sampled_B)
        few = Sampler.gather_logprobs(logprobs_BV, 1, sampled_B)
    finally:
        Sampler.gather_logprobs = staticmethod(before)
    # The one that was sampled comes first, then as many as any row has.
    assert found.logprob_token_ids.shape == found.logprobs.shape == (2, 4)
    assert few.logprobs.shape == (2, 2)
    assert set(found.logprob_token_ids[0, 1:3].tolist()) == {0, 2}
    assert set(found.logprob_token_ids[1, 1:].tolist()) == {0, 1, 3}
    assert found.logprobs[0].tolist() == pytest.approx([math.log(0.5)] * 3 + [-INF])
