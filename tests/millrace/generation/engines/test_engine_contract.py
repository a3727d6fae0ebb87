"""The contract of `engines/base.py`, run against every engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support.engines.policies import Offer, all_of, largest_mismatch, response_logits
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.sleeping.engine_alone import make_endless
from millrace.errors import WeightsMismatch
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy
from millrace.types import Request, Response, Sampling

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

MakePolicy = Callable[[int], LlamaForCausalLM]

PROMPTS = [[1, 3], [1, 4, 5, 6, 7, 8], [1, 9, 10], [1, 11, 12, 13, 14]] * 4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=8)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, make_policy: MakePolicy, tokenizer: PreTrainedTokenizerFast) -> Engine:
    """At version 0, with the weights of `make_policy(0)`, and nothing in flight."""
    if request.param == "transformers":
        return TransformersEngine(make_policy(0), tokenizer)
    running: Engine = request.getfixturevalue("vllm_engine")
    return running


def requests(prompts: Sequence[Sequence[int]], first_group: int = 0) -> list[Request]:
    return [
        Request(group_id=first_group + i, sample_index=i % 3, prompt_tokens=tuple(prompt), seed=i)
        for i, prompt in enumerate(prompts)
    ]


def tokens(responses: Sequence[Response]) -> list[tuple[int, ...]]:
    return [response.tokens for response in responses]


def sampled_from(logits_RV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[R, V] log-probabilities by definition: the smallest set with top_p of the mass of the top_k likeliest."""
    logits_RV = logits_RV / sampling.temperature
    for logits_V in logits_RV:
        if sampling.top_k is not None:
            logits_V[logits_V.argsort(descending=True)[sampling.top_k :]] = -torch.inf
        probabilities, mass = torch.softmax(logits_V, dim=-1).tolist(), 0.0
        for token in logits_V.argsort(descending=True).tolist():
            if mass >= sampling.top_p:
                logits_V[token] = -torch.inf
            mass += probabilities[token]
    return torch.log_softmax(logits_RV, dim=-1)


def as_sample(prompt: Sequence[int], response: Response, temperature: float) -> Sample:
    return Sample(
        prompt_tokens=np.array(prompt, np.int32),
        response_tokens=np.array(response.tokens, np.int32),
        rollout_logprobs=np.array(response.rollout_logprobs, np.float32),
        loss_mask=np.array(response.loss_mask, np.uint8),
        temperature=temperature,
        advantage=1.0,
        staleness=0,
        max_new_tokens=len(response.tokens),
        kept_tokens=np.array(response.kept_tokens, np.int32),
        kept_counts=np.array(response.kept_counts, np.int32),
    )


def assert_sampled_from(model: PreTrainedModel, responses: Sequence[Response], sampling: Sampling) -> None:
    """That the responses to PROMPTS were drawn from this model, by their log-probabilities."""
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logprobs_RV = sampled_from(response_logits(model, prompt, response), sampling)
        expected = [logprobs_RV[r, token].item() for r, token in enumerate(response.tokens)]
        assert response.rollout_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, None), (0.3, None), (0.95, None), (0.95, 4), (1.0, 3)])
def test_log_probabilities_are_those_of_the_distribution_and_on_policy_ratios_1(
    engine: Engine, make_policy: MakePolicy, temperature: float, top_p: float, top_k: int | None
) -> None:
    model = make_policy(0)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=8)
    if sampling.truncates and isinstance(engine, TransformersEngine):
        # In float32, rounding alone exceeds the bound below on some processors.
        engine.model.double()
        model.double()
    responses = engine.generate(PROMPTS, sampling, seed=1)
    assert_sampled_from(model, responses, sampling)
    samples = [as_sample(prompt, response, temperature) for prompt, response in zip(PROMPTS, responses, strict=True)]
    # Each sequence by itself, as the engine computes it: sharing prompts rounds differently.
    (batch,) = microbatches(samples, 1000, share_prefixes=False)
    assert (batch.kept is not None) == sampling.truncates
    policy = PackedPolicy(model)
    with torch.no_grad():
        ratios_N = (policy(batch)[0] - batch.rollout_logprobs_N).exp()
    # Over the whole vocabulary float32 rounds more.
    torch.testing.assert_close(ratios_N, torch.ones_like(ratios_N), rtol=0, atol=1e-5 if sampling.truncates else 1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, None), (0.8, 4), (1.0, 4)])
def test_the_kept_tokens_are_the_smallest_set_with_the_mass_of_top_p(
    engine: Engine, make_policy: MakePolicy, top_p: float, top_k: int | None
) -> None:
    sampling = Sampling(temperature=1.0, top_p=top_p, top_k=top_k, max_new_tokens=8)
    model = make_policy(0)
    for prompt, response in zip(PROMPTS, engine.generate(PROMPTS, sampling, seed=1), strict=True):
        possible_RV = sampled_from(response_logits(model, prompt, response), sampling) > -torch.inf
        expected = [set(possible_V.nonzero().squeeze(1).tolist()) for possible_V in possible_RV]
        kept = np.split(np.array(response.kept_tokens), np.cumsum(response.kept_counts)[:-1])
        assert [set(ids.tolist()) for ids in kept] == expected
        assert sum(response.kept_counts) == sum(len(ids) for ids in expected) == len(response.kept_tokens)
    for response in engine.generate(PROMPTS, replace(GREEDY, top_p=top_p, top_k=top_k), seed=1):
        assert response.kept_tokens == response.kept_counts == ()


def test_interrupted_responses_say_what_their_tokens_were_drawn_from(engine: Engine) -> None:
    engine.submit(requests(PROMPTS), Sampling(temperature=1.0, top_p=0.8, max_new_tokens=50))
    done = engine.collect(0.5)
    done += engine.interrupt()
    assert len(done) == len(PROMPTS)
    assert any(trajectory.response.tokens for trajectory in done)
    for response in (trajectory.response for trajectory in done):
        assert len(response.kept_counts) == len(response.tokens)
        kept = np.split(np.array(response.kept_tokens), np.cumsum(response.kept_counts)[:-1])
        assert all(token in ids for token, ids in zip(response.tokens, kept, strict=bool(response.tokens)))


def test_greedy_decoding_takes_the_likeliest_token_whatever_the_seed(engine: Engine, make_policy: MakePolicy) -> None:
    model = make_policy(0)
    for prompt, response in zip(PROMPTS, engine.generate(PROMPTS, GREEDY, seed=1), strict=True):
        best_R = torch.log_softmax(response_logits(model, prompt, response), dim=-1).max(dim=-1)
        assert list(response.tokens) == best_R.indices.tolist()
        assert response.rollout_logprobs == pytest.approx(best_R.values.tolist(), abs=1e-4)
    first, second = (tokens(engine.generate(PROMPTS, GREEDY, seed=seed)) for seed in (1, 2))
    assert first == second


def test_the_same_seed_draws_the_same_and_another_seed_others(engine: Engine) -> None:
    first = tokens(engine.generate(PROMPTS, SAMPLING, seed=1))
    assert tokens(engine.generate(PROMPTS, SAMPLING, seed=1)) == first
    assert tokens(engine.generate(PROMPTS, SAMPLING, seed=2)) != first
    for prompt in PROMPTS[:4]:
        assert engine.generate([prompt], SAMPLING, seed=1) == engine.generate([prompt], SAMPLING, seed=1)
    assert len(set(tokens(engine.generate([PROMPTS[0]] * 16, SAMPLING, seed=1)))) > 1, "members of a group differ"


def test_a_response_ends_with_its_first_end_token_or_at_the_limit(
    engine: Engine, tokenizer: PreTrainedTokenizerFast
) -> None:
    responses = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for response in responses:
        assert len(response.rollout_logprobs) == len(response.tokens)
        if response.finish_reason == "stop":
            assert response.tokens.index(tokenizer.eos_token_id) == len(response.tokens) - 1
        else:
            assert tokenizer.eos_token_id not in response.tokens
            assert len(response.tokens) == SAMPLING.max_new_tokens
    (shortest,) = engine.generate([PROMPTS[0]], replace(SAMPLING, max_new_tokens=1), seed=1)
    assert len(shortest.tokens) == 1


def test_what_was_submitted_comes_back_once_with_its_request(engine: Engine) -> None:
    submitted = [*requests(PROMPTS[:5]), *requests(PROMPTS[:4], first_group=7)]
    assert engine.collect(0.0) == []
    engine.submit(submitted[:5], SAMPLING)
    engine.submit(submitted[5:], SAMPLING)
    assert engine.in_flight == 9
    done = all_of(engine)
    assert sorted((trajectory.request for trajectory in done), key=lambda r: r.group_id) == submitted
    assert all(trajectory.t_started <= trajectory.t_finished for trajectory in done)
    assert engine.collect(0.0) == []


def test_requests_after_an_abort_are_not_mixed_up_with_earlier_ones(engine: Engine, make_policy: MakePolicy) -> None:
    engine.submit(requests(PROMPTS), SAMPLING)
    engine.abort()
    assert engine.in_flight == 0
    assert engine.collect(0.0) == []
    # Under the same names, but other prompts.
    again = requests(PROMPTS[::-1])
    engine.submit(again, SAMPLING)
    done = sorted(all_of(engine), key=lambda trajectory: trajectory.request.group_id)
    assert [trajectory.request for trajectory in done] == again
    responses = [trajectory.response for trajectory in done]
    assert_sampled_from(make_policy(0), responses[::-1], SAMPLING)


def test_after_a_sleep_it_continues_bit_for_bit_and_takes_new_weights(
    engine: Engine, make_policy: MakePolicy, offer: Offer
) -> None:
    previous, likely = engine.generate([PROMPTS[1]], SAMPLING, seed=1), engine.next_logprobs(PROMPTS[1], most=5)
    for _ in range(2):
        engine.sleep()
        engine.abort()
        engine.wake()
        assert engine.generate([PROMPTS[1]], SAMPLING, seed=1) == previous
        assert engine.next_logprobs(PROMPTS[1], most=5) == likely
    engine.update_weights(offer(make_policy(1), 7))
    assert_sampled_from(make_policy(1), engine.generate(PROMPTS, SAMPLING, seed=1), SAMPLING)


def test_asleep_the_weights_of_transformers_are_on_the_cpu(
    make_policy: MakePolicy, tokenizer: PreTrainedTokenizerFast
) -> None:
    # There is no other device here, but one that can't give anything back says who asks it to.
    with pytest.raises(NotImplementedError):
        TransformersEngine(make_policy(0).to("meta"), tokenizer).sleep()


def test_the_next_tokens_log_probabilities_are_the_policys_own(engine: Engine, make_policy: MakePolicy) -> None:
    text = (PROMPTS[1] * 8)[:45]
    with torch.no_grad():
        logprobs_V = torch.log_softmax(make_policy(0)(input_ids=torch.tensor([text])).logits[0, -1], dim=-1)
    best = logprobs_V.topk(5)
    expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    # The token that is sampled on the way must not show: several draws.
    for _ in range(4):
        assert engine.next_logprobs(text, most=5) == pytest.approx(expected, abs=1e-4)


def test_new_weights_give_their_version_and_outputs_to_what_follows(
    engine: Engine, make_policy: MakePolicy, offer: Offer
) -> None:
    previous = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert {response.version_spans for response in previous} == {((0, 0),)}
    offered = offer(make_policy(1), 7)
    assert engine.update_weights(offered) >= 0
    # The engine keeps its own copy.
    for tensor in offered.tensors.values():
        tensor.zero_()
    after = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert engine.policy_version == 7
    assert {response.version_spans for response in after} == {((7, 0),)}
    assert_sampled_from(make_policy(1), after, SAMPLING)
    assert tokens(after) != tokens(previous)


def test_only_responses_in_flight_read_kept_caches(
    engine: "TransformersEngine | VllmEngine", make_policy: MakePolicy, offer: Offer
) -> None:
    models: dict[int, PreTrainedModel] = {version: make_endless(make_policy(version)) for version in (1, 2)}
    # Longer than a block of vLLM's prefix cache.
    prompts = [(1, *(3 + i * i % 12 for i in range(40)), 3 + n) for n in range(8)]
    sampling = replace(SAMPLING, max_new_tokens=200)
    engine.update_weights(offer(models[1], 1))
    engine.keep_cache = True
    engine.submit(requests(prompts), sampling)
    while engine.tokens_in_flight < 200:
        assert engine.collect(0.0) == []
    engine.update_weights(offer(models[2], 2))
    engine.submit(requests(prompts, first_group=8), sampling)
    done = sorted(all_of(engine), key=lambda trajectory: trajectory.request.group_id)
    for prompt, old, new in zip(prompts, done[:8], done[8:], strict=True):
        assert [version for version, _ in old.response.version_spans] == [1, 2]
        # Log-probabilities are those of the distribution it sampled from, which the new weights alone do not give.
        assert largest_mismatch(models, prompt, old.response, kept=True) < 1e-4
        assert largest_mismatch(models, prompt, old.response) > 1e-2
        assert new.response.version_spans == ((2, 0),)
        assert largest_mismatch(models, prompt, new.response) < 1e-4


@pytest.mark.parametrize("damage", ["missing", "unknown", "of another shape"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    engine: Engine, make_policy: MakePolicy, offer: Offer, damage: str
) -> None:
    weights, name = offer(make_policy(1), 5), "model.norm.weight"
    tensors = dict(weights.tensors)
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        name = "model.abnorm.weight"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(3)
    engine.submit(requests(PROMPTS), SAMPLING)
    with pytest.raises(WeightsMismatch) as caught:
        engine.update_weights(replace(weights, tensors=tensors))
    assert f"{damage}: {name}" in str(caught.value)
    assert engine.policy_version == 0
    done = sorted(all_of(engine), key=lambda trajectory: trajectory.request.group_id)
    responses = [trajectory.response for trajectory in done]
    assert {response.version_spans for response in responses} == {((0, 0),)}
    assert_sampled_from(make_policy(0), responses, SAMPLING)


def test_generating_leaves_the_global_random_numbers_alone(engine: Engine) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(PROMPTS, SAMPLING, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_a_models_own_habits_of_decoding_change_nothing(engine: Engine, make_policy: MakePolicy) -> None:
    habitual = make_policy(0)
    greedy = engine.generate(PROMPTS, GREEDY, seed=1)
    of_habit = [
        habitual.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert [tuple(response) for response in of_habit] != tokens(greedy), "its habits would show here"
    assert_sampled_from(habitual, engine.generate(PROMPTS, SAMPLING, seed=1), SAMPLING)
