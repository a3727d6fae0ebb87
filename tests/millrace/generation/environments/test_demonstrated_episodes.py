"""Requests that are answered with demonstrations: alone without a model, or beside sampled ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines.policies import Offer, all_of
from support.engines.scripted_engine import ScriptedEngine
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.chat.encoder import PromptEncoder
from millrace.errors import PromptsError
from millrace.generation.engines.no_model import NoModel
from millrace.generation.environments.episodes import EpisodeRules, Episodes
from millrace.types import Demonstration, Prompt, Request, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)


@pytest.fixture
def engine(make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Episodes:
    make_model(0).save_pretrained(tmp_path)
    rules = EpisodeRules(encoder=PromptEncoder(tokenizer, PromptsConfig()), demonstrates=True)
    return Episodes(NoModel(tmp_path), {DEFAULT_SOURCE: rules})


def request(group_id: int, response: str) -> Request:
    shown = Demonstration(messages=({"role": "assistant", "content": response},))
    prompt = Prompt(prompt_id=f"p{group_id}", text="1+1=", answer="2", source="test", demonstration=shown)
    return Request(group_id=group_id, sample_index=0, prompt_tokens=(1, 4), seed=0, prompt=prompt)


def test_each_prompt_is_answered_with_its_demonstration(engine: Episodes, tokenizer: PreTrainedTokenizerFast) -> None:
    engine.submit([request(0, "2"), request(1, "13")], SAMPLING)
    assert engine.in_flight == 2
    done = all_of(engine)
    assert [tokenizer.decode(each.response.tokens) for each in done] == ["2<eos>", "13<eos>"]
    for response in (each.response for each in done):
        assert response.rollout_logprobs == (0.0,) * len(response.tokens)
        assert (response.version_spans, response.finish_reason) == (((0, 0),), "stop")


def test_a_demonstration_has_the_version_of_the_weights_that_arrived(
    engine: Episodes, make_model: Callable[..., LlamaForCausalLM], offer: Offer
) -> None:
    engine.submit([request(0, "2")], SAMPLING)
    engine.update_weights(offer(make_model(1), 7))
    engine.submit([request(1, "2")], SAMPLING)
    assert [each.response.version_spans for each in all_of(engine)] == [((0, 0),), ((7, 0),)]


def test_interrupted_it_returns_whole_responses(engine: Episodes) -> None:
    engine.submit([request(0, "2")], SAMPLING)
    assert [each.response.finish_reason for each in engine.interrupt()] == ["stop"]
    assert engine.in_flight == 0


def test_a_demonstration_longer_than_a_response_may_be_is_refused(engine: Episodes) -> None:
    engine.submit([request(0, "123")], SAMPLING)
    with pytest.raises(PromptsError) as caught:
        engine.submit([request(1, "1234")], SAMPLING)
    assert caught.value.file == "prompt p1"


def test_beside_demonstrations_the_policy_samples_for_the_other_sources(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, PromptsConfig())
    rules = {DEFAULT_SOURCE: EpisodeRules(encoder=encoder), "shown": EpisodeRules(encoder=encoder, demonstrates=True)}
    episodes = Episodes(ScriptedEngine(tokenizer, lambda _: "7$"), rules)
    asked = [request(0, "2"), replace(request(1, "13"), source="shown")]
    episodes.submit(asked, SAMPLING)
    assert episodes.in_flight == 2
    done = {each.request.group_id: tokenizer.decode(each.response.tokens) for each in all_of(episodes)}
    assert done == {0: "7<eos>", 1: "13<eos>"}
    episodes.submit(asked, SAMPLING)
    assert {each.request.group_id: len(each.response.tokens) > 0 for each in episodes.interrupt()} == {
        0: False,
        1: True,
    }
    assert episodes.in_flight == 0
