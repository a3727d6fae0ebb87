"""The engine that answers with demonstrations: no policy, the version it was told, nothing ever lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines.policies import Offer, all_of
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.chat.encoder import PromptEncoder
from millrace.errors import PromptsError
from millrace.generation.engines.demonstrations import Demonstrations
from millrace.types import Demonstration, Prompt, Request, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)


@pytest.fixture
def engine(
    make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Demonstrations:
    make_model(0).save_pretrained(tmp_path)
    return Demonstrations(tmp_path, {DEFAULT_SOURCE: PromptEncoder(tokenizer, PromptsConfig())})


def request(group_id: int, response: str) -> Request:
    shown = Demonstration(messages=({"role": "assistant", "content": response},))
    prompt = Prompt(prompt_id=f"p{group_id}", text="1+1=", answer="2", source="test", demonstration=shown)
    return Request(group_id=group_id, sample_index=0, prompt_tokens=(1, 4), seed=0, prompt=prompt)


def test_each_prompt_is_answered_with_its_demonstration(
    engine: Demonstrations, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.submit([request(0, "2"), request(1, "13")], SAMPLING)
    assert engine.in_flight == 2
    done = all_of(engine)
    assert [tokenizer.decode(each.response.tokens) for each in done] == ["2<eos>", "13<eos>"]
    for response in (each.response for each in done):
        assert response.rollout_logprobs == (0.0,) * len(response.tokens)
        assert (response.version_spans, response.finish_reason) == (((0, 0),), "stop")


def test_a_demonstration_has_the_version_of_the_weights_that_arrived(
    engine: Demonstrations, make_model: Callable[..., LlamaForCausalLM], offer: Offer
) -> None:
    engine.submit([request(0, "2")], SAMPLING)
    engine.update_weights(offer(make_model(1), 7))
    engine.submit([request(1, "2")], SAMPLING)
    assert [each.response.version_spans for each in all_of(engine)] == [((0, 0),), ((7, 0),)]


def test_interrupted_it_returns_whole_responses(engine: Demonstrations) -> None:
    engine.submit([request(0, "2")], SAMPLING)
    assert [each.response.finish_reason for each in engine.interrupt()] == ["stop"]
    assert engine.in_flight == 0


def test_a_demonstration_longer_than_a_response_may_be_is_refused(engine: Demonstrations) -> None:
    engine.submit([request(0, "123")], SAMPLING)
    with pytest.raises(PromptsError) as caught:
        engine.submit([request(1, "1234")], SAMPLING)
    assert caught.value.file == "prompt p1"
