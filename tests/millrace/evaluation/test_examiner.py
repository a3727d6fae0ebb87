"""Requests and measures of an examiner, with an engine whose answers are scripted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines.scripted_engine import ScriptedEngine

from configs.prompts import EvaluationConfig, PromptsConfig
from configs.scoring import ScoringConfig
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.chat.encoder import PromptEncoder
from millrace.errors import InputError
from millrace.evaluation.examiner import EvaluationSet, Examiner, Rules, Stopped, evaluation_sets, with_evaluation_sets
from millrace.evaluation.results import HELD_OUT
from millrace.prompts.dataset import load_prompts
from millrace.rewards.scorer import Scorer, make_scorer
from millrace.types import Prompt, Request, Sampling

TOKENIZER = character_tokenizer(["0123456789+="])
ENCODER = PromptEncoder(TOKENIZER, PromptsConfig())
RULES = Rules(
    sampling=Sampling(temperature=0.5, top_p=1.0, max_new_tokens=3), seed=100, batch_size=2, answer_pattern=None
)
PROMPTS = [Prompt(prompt_id=str(n), text=f"{n}+{n}=", answer=str(2 * n), source="s") for n in range(1, 5)]


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    with make_scorer(ScoringConfig(reward="exact_match"), PromptsConfig()) as ready:
        yield ready


def right_below_three(request: Request) -> str:
    assert request.prompt is not None
    number = int(request.prompt.text[0])
    return f"{2 * number}$" if number < 3 else "0$"


def test_held_out_measures_are_at_the_top_and_further_sets_below(scorer: Scorer) -> None:
    examiner = Examiner(ScriptedEngine(TOKENIZER, right_below_three), ENCODER, scorer, RULES, lambda: True)
    sets = {
        HELD_OUT: EvaluationSet(prompts=PROMPTS, samples=1),
        "easy": EvaluationSet(prompts=PROMPTS[:2], samples=2),
    }
    measured = examiner.measure(sets)
    assert (measured["accuracy"], measured["prompts"], measured["errors"]) == (0.5, 4, 0)
    low, high = measured["accuracy_interval"]
    assert 0 < low < 0.5 < high < 1
    assert "pass_at" not in measured
    easy = measured["sets"]["easy"]
    assert (easy["accuracy"], easy["prompts"], easy["samples"]) == (1.0, 2, 2)
    assert easy["pass_at"]["2"]["value"] == easy["majority"]["value"] == 1.0
    assert "sets" not in examiner.measure({HELD_OUT: sets[HELD_OUT]})


def test_a_set_without_any_score_has_no_accuracy() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda request: "1$" if request.prompt == PROMPTS[0] else "0$")
    config = ScoringConfig(reward="tests.support.rewards.own_rewards:one_over_response")
    sets = {
        HELD_OUT: EvaluationSet(prompts=PROMPTS[1:], samples=2),
        "easy": EvaluationSet(prompts=PROMPTS[:1], samples=1),
    }
    with make_scorer(config, PromptsConfig()) as scorer:
        measured = Examiner(engine, ENCODER, scorer, RULES, lambda: True).measure(sets)
    assert (measured["accuracy"], measured["accuracy_interval"], measured["errors"]) == (None, None, 3)
    assert "pass_at" not in measured
    assert (measured["sets"]["easy"]["accuracy"], measured["sets"]["easy"]["errors"]) == (1.0, 0)


def test_no_two_answers_of_a_set_share_a_seed(scorer: Scorer) -> None:
    engine = ScriptedEngine(TOKENIZER, right_below_three)
    requested: list[tuple[float, int]] = []
    submit = engine.submit

    def noted(requests: list[Request], sampling: Sampling) -> None:
        requested.extend((sampling.temperature, request.seed) for request in requests)
        submit(requests, sampling)

    engine.submit = noted  # type: ignore[assignment]
    examiner = Examiner(engine, ENCODER, scorer, RULES, lambda: True)
    examiner.measure({HELD_OUT: EvaluationSet(prompts=PROMPTS, samples=2)})
    assert requested == [(0.0, n) for n in range(4)] + [(0.5, 100 + n) for n in range(8)]


def test_a_stopped_evaluation_leaves_nothing_in_flight(scorer: Scorer) -> None:
    continues = iter([True, True, False])
    engine = ScriptedEngine(TOKENIZER, right_below_three)
    examiner = Examiner(engine, ENCODER, scorer, RULES, lambda: next(continues))
    with pytest.raises(Stopped):
        examiner.measure({HELD_OUT: EvaluationSet(prompts=PROMPTS, samples=1)})
    assert engine.in_flight == 0


def test_sets_are_loaded_and_cut_to_their_number_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "hard.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(5)))
    prompts = PromptsConfig(source="arithmetic", num_eval=6, digits=1)
    config = EvaluationConfig.model_validate({"sets": {"hard": {"source": str(file), "num_prompts": 3, "samples": 4}}})
    loaded = load_prompts(prompts)
    sets = evaluation_sets(config, prompts, loaded)
    assert with_evaluation_sets(loaded, sets).eval == (*loaded.eval, *sets["hard"].prompts)
    assert list(sets) == [HELD_OUT, "hard"]
    assert len(sets[HELD_OUT].prompts) == 6
    assert [prompt.text for prompt in sets["hard"].prompts] == ["0+1=", "1+1=", "2+1="]
    assert sets["hard"].samples == 4
    file.write_text("{}")
    with pytest.raises(InputError):
        evaluation_sets(config, prompts, loaded)
