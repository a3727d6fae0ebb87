"""The contract of `engines/base.py`, run against every engine."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.engines.base import Engine
from millrace.engines.transformers import TransformersEngine
from millrace.types import Response, Sampling

MakeModel = Callable[..., LlamaForCausalLM]
MakeEngine = Callable[[LlamaForCausalLM], Engine]

ENGINES = [pytest.param(TransformersEngine, id="transformers")]

PROMPTS = [[1, 3], [1, 4, 5, 6, 7, 8], [1, 9, 10], [1, 11, 12, 13, 14]] * 4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=8)


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> MakeEngine:
    make: Callable[[LlamaForCausalLM, PreTrainedTokenizerFast], Engine] = request.param
    return lambda model: make(model, tokenizer)


@pytest.fixture
def engine(make_engine: MakeEngine, make_model: MakeModel) -> Engine:
    return make_engine(make_model(0))


def parameters(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def next_token_logits(model: LlamaForCausalLM, prompt: list[int], response: Response) -> torch.Tensor:
    """[R, V] before each token of the response: the prompt alone, no padding, no cache."""
    tokens = torch.tensor([[*prompt, *response.tokens]])
    with torch.no_grad():
        logits_RV: torch.Tensor = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    return logits_RV


def sampled_from(logits_RV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[R, V] log-probabilities after temperature and top-p, by definition: the smallest set with mass of top_p."""
    logits_RV = logits_RV / sampling.temperature
    for logits_V in logits_RV:
        probabilities, mass = torch.softmax(logits_V, dim=-1).tolist(), 0.0
        for token in logits_V.argsort(descending=True).tolist():
            if mass >= sampling.top_p:
                logits_V[token] = -torch.inf
            mass += probabilities[token]
    return torch.log_softmax(logits_RV, dim=-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_log_probabilities_are_those_of_the_distribution_sampled_from_whatever_the_padding(
    engine: Engine, make_model: MakeModel, temperature: float, top_p: float
) -> None:
    sampling, model = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=8), make_model(0)
    for prompt, response in zip(PROMPTS, engine.generate(PROMPTS, sampling, seed=1), strict=True):
        logprobs_RV = sampled_from(next_token_logits(model, prompt, response), sampling)
        expected = [logprobs_RV[r, token].item() for r, token in enumerate(response.tokens)]
        assert response.rollout_logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_decoding_takes_the_likeliest_token_and_tells_its_unscaled_log_probability(
    engine: Engine, make_model: MakeModel
) -> None:
    model = make_model(0)
    for prompt, response in zip(PROMPTS, engine.generate(PROMPTS, GREEDY, seed=1), strict=True):
        best_R = torch.log_softmax(next_token_logits(model, prompt, response), dim=-1).max(dim=-1)
        assert list(response.tokens) == best_R.indices.tolist()
        assert response.rollout_logprobs == pytest.approx(best_R.values.tolist(), abs=1e-4)


def test_the_same_seed_draws_the_same_responses_and_another_seed_draws_others(engine: Engine) -> None:
    first = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == first
    assert engine.generate(PROMPTS, SAMPLING, seed=2) != first


def test_members_of_a_group_are_drawn_independently(engine: Engine) -> None:
    assert len({response.tokens for response in engine.generate([PROMPTS[0]] * 16, SAMPLING, seed=1)}) > 1


def test_greedy_decoding_does_not_depend_on_the_seed(engine: Engine) -> None:
    assert engine.generate(PROMPTS, GREEDY, seed=1) == engine.generate(PROMPTS, GREEDY, seed=2)


def test_a_response_ends_with_its_first_end_token_or_at_the_length_limit_and_says_which(
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


@pytest.mark.parametrize("max_new_tokens", [1, 3])
def test_no_response_is_longer_than_the_limit(engine: Engine, max_new_tokens: int) -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=max_new_tokens)
    lengths = [len(response.tokens) for response in engine.generate(PROMPTS, sampling, seed=1)]
    assert max(lengths) == max_new_tokens


def test_new_weights_give_their_version_and_their_outputs_to_what_follows(
    engine: Engine, make_engine: MakeEngine, make_model: MakeModel
) -> None:
    before = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert {response.version_spans for response in before} == {((0, 0),)}
    engine.update_weights(parameters(make_model(1)), policy_version=7)
    after = engine.generate(PROMPTS, SAMPLING, seed=1)
    assert engine.policy_version == 7
    assert {response.version_spans for response in after} == {((7, 0),)}
    fresh = make_engine(make_model(1)).generate(PROMPTS, SAMPLING, seed=1)
    assert [response.tokens for response in after] == [response.tokens for response in fresh]
    assert [response.tokens for response in after] != [response.tokens for response in before]


def test_an_engine_keeps_its_own_copy_of_new_weights(engine: Engine, make_model: MakeModel) -> None:
    handed_over = parameters(make_model(1))
    engine.update_weights(handed_over, policy_version=1)
    before = engine.generate(PROMPTS, SAMPLING, seed=1)
    for tensor in handed_over.values():
        tensor.zero_()
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == before


@pytest.mark.parametrize("damage", ["missing", "unknown", "of another shape"])
def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_stay(
    engine: Engine, make_model: MakeModel, damage: str
) -> None:
    before = engine.generate(PROMPTS, SAMPLING, seed=1)
    tensors, name = parameters(make_model(1)), "model.norm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        name = "model.abnorm.weight"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(3)
    with pytest.raises(ValueError, match=f"version 5 .*: {damage}: {name}$"):
        engine.update_weights(tensors, policy_version=5)
    assert engine.policy_version == 0
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == before


def test_generating_leaves_the_global_random_numbers_alone(engine: Engine) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(PROMPTS, SAMPLING, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_a_models_own_habits_of_decoding_change_nothing(make_engine: MakeEngine, make_model: MakeModel) -> None:
    plain, habitual = make_model(0), make_model(0)
    habitual.generation_config.do_sample = True
    habitual.generation_config.top_k = 2
    habitual.generation_config.repetition_penalty = 5.0
    habitual.generation_config.temperature = 0.1
    for sampling in (SAMPLING, GREEDY):
        expected = make_engine(plain).generate(PROMPTS, sampling, seed=1)
        assert make_engine(habitual).generate(PROMPTS, sampling, seed=1) == expected
