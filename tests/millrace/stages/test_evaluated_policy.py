"""Measures of a random model in the evaluate stage, for one source and for several with settings of their own."""

from pathlib import Path
from typing import Any

import pytest
from support.chat.model_folder import chat_model_folder
from support.stores.dict_store import DictStore

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.runtime.arguments import StageArguments
from millrace.runtime.stage import Stage
from millrace.stages.evaluate import EvaluatedPolicy

SUMS = {
    "prompts": {"num_eval": 3, "digits": 1},
    "generation": {"max_new_tokens": 2},
    "scoring": {"reward": "tests.support.rewards.own_rewards:length"},
}
TOOLS = {
    "weight": 3.0,
    "prompts": {"num_eval": 2, "chat": True},
    "environment": {"name": "calculator_tool"},
    "evaluation": {"samples": 2, "sets": {"chains": {"source": "chains", "num_prompts": 4}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model_folder(tmp_path_factory.mktemp("model"))


def policy(folder: Path, **sections: Any) -> EvaluatedPolicy:
    config = RunConfig.model_validate(
        {"training": {"max_steps": 1}, "model": {"path": str(folder), "dtype": "float32"}, **sections}
    )
    arguments = StageArguments(run_url="dict://", attempt=0, replica=0, handover=Path("/nowhere"))
    return EvaluatedPolicy(Stage(name="evaluate", arguments=arguments, config=config, store=DictStore()))


@pytest.fixture(scope="module")
def mixed(folder: Path) -> dict[str, Any]:
    """Measures of both sources."""
    return policy(folder, sources={"sums": SUMS, "tools": TOOLS}).measure(None)[0]


def test_each_source_is_measured_by_its_own_settings(mixed: dict[str, Any]) -> None:
    sets = mixed["sets"]
    assert {name: (part["prompts"], part.get("samples")) for name, part in sets.items()} == {
        "sums": (3, None),
        "tools": (2, 2),
        "tools/chains": (4, None),
    }
    assert sets["sums"]["accuracy"] > 0, "the length of a response, which only this source counts"
    assert sets["tools"]["accuracy"] == 0
    assert mixed["accuracy"] == pytest.approx(sets["sums"]["accuracy"] / 4)
    assert (mixed["prompts"], mixed["weights"]) == (5, {"sums": 1.0, "tools": 3.0})


def test_a_source_is_measured_alike_alone_and_in_a_mixture(folder: Path, mixed: dict[str, Any]) -> None:
    assert policy(folder, **SUMS).measure(None)[0] == mixed["sets"]["sums"]
    alone = policy(folder, sources={"tools": TOOLS}).measure(None)[0]
    assert alone == {**mixed["sets"]["tools"], "sets": {"chains": mixed["sets"]["tools/chains"]}}


def test_the_weights_of_the_evaluation_take_the_place_of_the_mixture_s(folder: Path) -> None:
    weights = {"sums": 2.0}
    measures = policy(folder, sources={"sums": SUMS, "tools": TOOLS}, evaluation={"weights": weights}).measure(None)[0]
    assert (measures["accuracy"], measures["weights"]) == (measures["sets"]["sums"]["accuracy"], weights)


def test_prompts_that_can_not_be_loaded_name_their_source(folder: Path) -> None:
    broken = {**SUMS, "prompts": {"source": "/missing.jsonl"}}
    with pytest.raises(InputError) as caught:
        policy(folder, sources={"sums": broken, "tools": TOOLS})
    assert "sums" in str(caught.value)
