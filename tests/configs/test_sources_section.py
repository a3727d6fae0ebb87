"""Sources of a mixture: what they inherit, how they are set, and which mistakes name them."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError, UserError
from configs.load import changed_immutably, load_config, with_overrides
from configs.schema import RunConfig
from configs.sources import naming_source
from configs.stored import changed_keys


def mixture(sources: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    training = {"max_steps": 3} | sections.pop("training", {})
    return RunConfig.model_validate({"sources": sources or {}, "training": training, **sections})


def mistakes(sources: dict[str, Any], *settings: str, **sections: Any) -> list[UserError]:
    values = {"sources": sources, "training": {"max_steps": 3}, **sections}
    with pytest.raises(ConfigError) as caught:
        with_overrides(values, settings, where="run.yaml")
    return list(caught.value.mistakes)


def test_a_run_without_sources_is_one_source() -> None:
    config = mixture()
    assert config.by_source() == {"default": config}


def test_a_source_has_the_runs_keys_unless_it_sets_them() -> None:
    config = mixture(
        {"sums": {"prompts": {"digits": 3}}, "words": {"weight": 2.0, "scoring": {"answer_pattern": "(.)"}}},
        prompts={"num_eval": 9, "digits": 1},
        generation={"group_size": 4, "replicas": 2},
        scoring={"timeout_seconds": 1.0},
    )
    sums, words = config.by_source().values()
    assert [(each.prompts.num_eval, each.prompts.digits) for each in (sums, words)] == [(9, 3), (9, 1)]
    assert sums.generation == words.generation == config.generation
    assert (words.scoring.answer_pattern, words.scoring.timeout_seconds) == ("(.)", 1.0)
    assert sums.scoring == config.scoring


def test_a_source_inherits_parts_of_a_section_within_a_section() -> None:
    arguments = {"chain_sum": {"max_digits": 2}}
    config = mixture(
        {"gym": {"prompts": {"source": "reasoning_gym:chain_sum", "reasoning_gym": {"size": 7, "config": arguments}}}},
    )
    (gym,) = config.by_source().values()
    assert (gym.prompts.reasoning_gym.size, gym.prompts.reasoning_gym.config) == (7, arguments)
    assert gym.prompts.num_eval == config.prompts.num_eval


def test_a_source_may_have_an_objective_of_its_own() -> None:
    config = mixture(
        {
            "sums": {"training": {"loss": "gspo", "kl": {"coefficient": 0.0}}},
            "chat": {"training": {"loss": {"max_importance_ratio": 8.0}, "advantage": "grpo"}},
            "code": {},
        },
        training={"loss": {"name": "aipo", "max_importance_ratio": 2.0}, "kl": {"coefficient": 0.1, "estimator": "k2"}},
    )
    sums, chat, code = config.trainings().values()
    assert (sums.loss.name, sums.kl.coefficient, sums.kl.estimator) == ("gspo", 0.0, "k2")
    assert (chat.loss.name, chat.loss.model_dump()["max_importance_ratio"], chat.advantage) == ("aipo", 8.0, "grpo")
    assert code == config.training


def test_a_penalty_of_a_source_needs_the_runs_reference_policy() -> None:
    (mistake,) = mistakes({"chat": {"training": {"kl": {"coefficient": 0.1}}}})
    assert (mistake.key, mistake.read) == ("sources.chat.training.kl.coefficient", "0.1")


def test_a_source_may_have_scorers_of_its_own() -> None:
    config = mixture({"sums": {}, "chat": {"scoring": {"replicas": 2}}}, scoring={"replicas": 3})
    assert config.annotators.replicas == {"scores/exact_match": 3, "scores/exact_match@chat": 2}
    assert [config.annotators.annotator("scores", replica) for replica in (0, 2, 3, 4)] == [
        ("scores/exact_match", 0),
        ("scores/exact_match", 2),
        ("scores/exact_match@chat", 0),
        ("scores/exact_match@chat", 1),
    ]
    pools = ["scores/exact_match", "scores/exact_match@chat"]
    assert [config.annotators.of_source("scores", source) for source in config.sources] == pools


def test_the_runs_own_scorers_score_one_source_at_least() -> None:
    (mistake,) = mistakes({"chat": {"scoring": {"replicas": 2}}})
    assert mistake.key == "sources.chat.scoring.replicas"


OWN_SCORERS = {"scoring": {"replicas": 1}}


@pytest.mark.parametrize("sources", [{"sums": {}, "chat": OWN_SCORERS}, {"sums": OWN_SCORERS, "chat": {}}])
def test_a_resumed_run_keeps_the_scorers_of_its_sources(sources: dict[str, Any]) -> None:
    (sentence,) = changed_immutably(mixture({"sums": {}}), mixture(sources))
    assert ".scoring.replicas" in sentence


def test_set_changes_a_key_of_one_source() -> None:
    values: dict[str, Any] = {"sources": {"math": {"weight": 2.0}, "sums": {}}, "training": {"max_steps": 3}}
    settings = ["sources.math.weight=0.3", "sources.sums.prompts.digits=3", "sources.words={weight: 4}"]
    config = with_overrides(values, settings, where="run.yaml")
    assert [source.weight for source in config.sources.values()] == [0.3, 1.0, 4.0]
    assert config.by_source()["sums"].prompts.digits == 3


def test_set_reaches_an_evaluation_set_of_a_source() -> None:
    settings = ["sources.sums.evaluation.sets.long.source=arithmetic"]
    config = with_overrides({"training": {"max_steps": 3}}, settings, where="run.yaml")
    assert list(config.by_source()["sums"].evaluation.sets) == ["long"]


def test_a_stored_mixture_is_the_same_and_still_inherits() -> None:
    config = mixture({"sums": {"prompts": {"digits": 1}}, "words": {"weight": 2.0}}, prompts={"num_eval": 9})
    stored = json.loads(json.dumps(config.model_dump(mode="json")))
    assert stored["sources"] == {"sums": {"prompts": {"digits": 1}}, "words": {"weight": 2.0}}
    assert RunConfig.model_validate(stored) == config
    stored["prompts"]["num_eval"] = 8
    assert RunConfig.model_validate(stored).by_source()["sums"].prompts.num_eval == 8


# --- mistakes


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"weight": 0.0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"final_weight": 0.0, "weight_steps": 3}, "final_weight"),
        ({"final_weight": 1.0}, "final_weight"),
        ({"weight_steps": 3}, "weight_steps"),
        ({"solved_at": 1.5}, "solved_at"),
        ({"wait": 1.0}, "wait"),
        ({"prompts": {"digit": 3}}, "prompts.digit"),
        ({"generation": {"replicas": 2}}, "generation.replicas"),
        ({"training": {"groups_per_step": 8}}, "training.groups_per_step"),
        ({"training": {"loss": "apio"}}, "training.loss.name"),
        ({"scoring": {"answer_pattern": "no group"}}, "scoring.answer_pattern"),
        ({"scoring": {"reward": "reasoning_gym"}}, "scoring.reward"),
        ({"prompts": {"num_eval": 9999}}, "prompts.num_eval"),
        ({"prompts": {"template": "{prompt}?"}}, "prompts.template"),
        ({"environment": {"name": "calculator", "max_turns": 1}}, "environment.max_turns"),
        ({"generation": {"max_new_tokens": 99999}}, "generation.max_new_tokens"),
        ({"evaluation": {"sets": {"hard": {"source": "chains", "prompts": 3}}}}, "evaluation.sets.hard.prompts"),
    ],
)
def test_a_mistake_in_a_source_is_one_line_that_names_it(source: dict[str, Any], key: str) -> None:
    (mistake,) = mistakes({"sums": {}, "math": source})
    assert (mistake.file, mistake.key) == ("run.yaml", f"sources.math.{key}")
    assert len(str(mistake).splitlines()) == 1


def test_an_unknown_key_is_answered_with_the_one_probably_meant() -> None:
    (mistake,) = mistakes({"sums": {}}, "sources.sums.wieght=2")
    assert (mistake.file, mistake.key, mistake.expected) == ("--set", "sources.sums.wieght", "sources.sums.weight")
    (mistake,) = mistakes({"sums": {"evaluation": {"sets": {"hard": {"source": "chains", "prompts": 3}}}}})
    assert "num_prompts" in str(mistake.expected)


def test_two_sources_with_one_name_are_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sources:\n  math: {}\n  sums: {}\n  math: {weight: 2}\ntraining: {max_steps: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "math" in caught.value.read


@pytest.mark.parametrize("name", ["", "two words", "a/b", "7", "a.b"])
def test_a_name_that_streams_and_charts_cannot_have_is_a_mistake(name: str) -> None:
    (mistake,) = mistakes({name: {}})
    assert mistake.key == "sources"


def test_keys_that_sources_inherit_are_one_mistake_of_the_run() -> None:
    (mistake,) = mistakes({"sums": {}, "math": {}}, generation={"max_new_tokens": 99999})
    assert mistake.key == "generation.max_new_tokens"
    (mistake,) = mistakes({"sums": {}, "math": {}}, generation={"groups_per_batch": 9999})
    assert mistake.key == "generation.groups_per_batch"


def test_a_key_of_the_run_is_named_with_the_key_of_the_source_that_contradicts_it() -> None:
    selection = {"selection": {"overlong_buffer": 9}, "max_steps": 3}
    (mistake,) = mistakes({"sums": {"generation": {"max_new_tokens": 4}}, "math": {}}, training=selection)
    assert mistake.key == "training.selection.overlong_buffer"
    assert "sources.sums.generation.max_new_tokens is 4" in mistake.read


def test_settings_by_task_may_be_those_of_any_source() -> None:
    gym = {"prompts": {"source": "reasoning_gym:chain_sum"}, "scoring": {"reward": "reasoning_gym"}}
    factors = {"selection": {"source_factors": {"chain_sum": 2.0}}}
    arguments = {"reasoning_gym": {"config": {"chain_sum": {"max_digits": 2}}}}
    mixture({"gym": gym, "sums": {}}, training=factors, prompts=arguments)
    unasked = mistakes({"sums": {}}, prompts=arguments)
    assert [mistake.key for mistake in unasked] == ["prompts.reasoning_gym.config"]


def test_gpus_for_scorers_are_used_if_any_source_has_a_reward_model() -> None:
    sections: dict[str, Any] = {"scoring": {"device": "cuda"}, "placement": {"score": {"devices": [0]}}}
    judged = {"scoring": {"reward": "reward_model", "model": "judge"}}
    assert mixture({"words": judged, "sums": {}}, **sections).loads_scoring_model
    (mistake,) = mistakes({"sums": {}, "math": {}}, **sections)
    assert mistake.key == "placement.score.devices"


def test_errors_in_a_block_name_its_source() -> None:
    with pytest.raises(UserError) as caught, naming_source("math"):
        raise UserError("telepathy", key="scoring.reward")
    assert caught.value.key == "sources.math.scoring.reward"
    with pytest.raises(UserError) as caught, naming_source("math"):
        raise UserError("empty", file="sums.jsonl")
    assert caught.value.file == "source math: sums.jsonl"
    with pytest.raises(UserError) as caught, naming_source("math"):
        raise UserError("8", key="generation.replicas")
    assert caught.value.key == "generation.replicas"
    with pytest.raises(UserError) as caught, naming_source("default"):
        raise UserError("telepathy", key="scoring.reward")
    assert caught.value.key == "scoring.reward"


# --- resumed runs

TWO = {"sums": {"prompts": {"digits": 3}}, "words": {}}


@pytest.mark.parametrize(
    "sources",
    [
        {**TWO, "math": {"prompts": {"source": "chains"}}},
        {"words": {"weight": 3.0}, "sums": {**TWO["sums"], "final_weight": 2.0, "weight_steps": 5}},
        {"words": {"solved_at": 0.9, "evaluation": {"samples": 4}}, "sums": TWO["sums"]},
    ],
    ids=["an added source", "other weights", "another target and evaluation"],
)
def test_a_resumed_run_may_be_mixed_in_another_way(sources: dict[str, Any]) -> None:
    assert changed_immutably(mixture(TWO), mixture(sources)) == []


def test_a_resumed_run_keeps_its_sources_and_their_settings() -> None:
    changed = {"sums": {"prompts": {"digits": 2}, "scoring": {"reward": "math"}}}
    sentences = changed_immutably(mixture(TWO), mixture(changed))
    keys = [sentence.partition(" ")[0] for sentence in sentences]
    assert keys == ["sources.sums.prompts.digits", "sources.sums.scoring.reward", "sources.words"]


def test_a_key_of_the_run_is_named_once() -> None:
    (sentence,) = changed_immutably(mixture(TWO), mixture(TWO, generation={"replicas": 2}))
    assert sentence.startswith("generation.replicas was 1")


def test_an_inherited_key_may_move_into_the_sources() -> None:
    after = mixture({"sums": {"prompts": {"digits": 3}}, "words": {"prompts": {"digits": 2}}}, prompts={"digits": 1})
    assert changed_immutably(mixture(TWO), after) == []


def test_a_run_without_sources_stays_one() -> None:
    plain, mixed = mixture(), mixture({"default": {}, "math": {}})
    for before, after in ((plain, mixed), (mixed, plain)):
        (sentence, *_) = changed_immutably(before, after)
        assert sentence.startswith("sources was")


def test_changes_of_a_mixture_are_recorded_in_sentences() -> None:
    before, after = (
        mixture(sources).model_dump(mode="json")
        for sources in ({"sums": {}, "math": {"weight": 1.0}}, {"sums": {"weight": 2.0}, "math": {}, "words": {}})
    )
    assert changed_keys(before, after) == [
        "sources.math.weight was 1.0 and is not set",
        "sources.sums.weight was not set and is 2.0",
        "sources.words was not set and is {}",
    ]
