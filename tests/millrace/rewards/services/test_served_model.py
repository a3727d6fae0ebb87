"""A judge whose model the scorer loads itself: greedy completions, several at once; its errors reach the scorer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat.model_folder import chat_model_folder
from support.engines.vllm_processes import ENGINE_ARGS, HIDDEN_SIZE
from support.rewards.one_source import score_pairs, scorer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.task import JudgeConfig, ScoringConfig
from millrace.errors import InputError
from millrace.rewards.factory import make_reward
from millrace.rewards.services.served_model import ServedModel
from millrace.types import Prompt

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model_folder(tmp_path_factory.mktemp("judge"), context=128, hidden_size=HIDDEN_SIZE)


def body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def expected_text(folder: Path, text: str) -> str:
    """The greedy completion by transformers' own loop."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(body(text)["messages"], add_generation_prompt=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokens["input_ids"] if not torch.is_tensor(tokens) else tokens
    generated = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
    return str(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_completions_are_the_models_greedy_ones_and_tokens_are_counted(folder: Path, engine: str) -> None:
    judge = JudgeConfig(
        engine=engine,  # type: ignore[arg-type]
        engine_args=ENGINE_ARGS if engine == "vllm" else {},
        max_tokens=MAX_TOKENS,
    )
    served = ServedModel(folder, "cpu", judge, in_flight=2)
    served.open()
    texts = ["6*7=", "one", "a longer question", "2"]
    answers = [served.submit("/chat/completions", body(text)) for text in texts]
    values = [answer.result(timeout=120).values for answer in answers]
    served.close()
    assert [value["choices"][0]["message"]["content"] for value in values if value] == [
        expected_text(folder, text) for text in texts
    ]
    assert served.meter.usage.requests == len(texts)
    assert served.meter.usage.output_tokens == sum(value["usage"]["completion_tokens"] for value in values if value)


def test_a_request_that_exceeds_the_context_is_an_error_of_its_own(folder: Path) -> None:
    served = ServedModel(folder, "cpu", JudgeConfig(max_tokens=100), in_flight=2)
    served.open()
    answers = [served.submit("", body("a" * length)) for length in (200, 1)]
    statuses = [answer.result(timeout=60).status for answer in answers]
    served.close()
    assert statuses == ["error", "ok"]


def test_an_error_of_the_engine_is_that_of_every_later_answer(folder: Path) -> None:
    served = ServedModel(folder, "cpu", JudgeConfig(), in_flight=2)
    served.open()
    for request in ({}, body("1")):
        with pytest.raises(KeyError):
            served.submit("", request).result(timeout=60)
    served.close()


def test_a_grade_that_does_not_parse_is_an_error_with_its_exchange(folder: Path) -> None:
    settings = {"reward": "judge", "model": str(folder), "judge": {"max_tokens": MAX_TOKENS, "rubric": "?"}}
    question = Prompt(prompt_id="1", text="1", answer="1", source="sums")
    with scorer_of(make_reward(ScoringConfig.model_validate(settings))) as scorer:
        (score,) = score_pairs(scorer, [(question, "1")])
    assert (score.status, score.reward) == ("error", None)


@pytest.mark.parametrize(
    ("judge", "model", "key"),
    [
        ({"model": "large"}, "here", "scoring.judge.model"),
        ({}, None, "scoring.judge.model"),
        ({}, "here", "scoring.model"),
    ],
)
def test_a_judge_has_exactly_one_model_and_a_loaded_one_can_chat(
    judge: dict[str, Any], model: str | None, key: str, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    path = None if model is None else str(tmp_path)
    settings = {"reward": "judge", "endpoint": {"url": "http://127.0.0.1"}, "judge": judge, "model": path}
    with pytest.raises(InputError) as caught:
        make_reward(ScoringConfig.model_validate(settings))
    assert caught.value.key == key
