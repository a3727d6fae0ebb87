"""The config of a replay, from its source's and its own settings."""

from pathlib import Path

import pytest
from support.replay.mixed_run import as_mixture
from support.replay.trained_run import TrainedRun, train_and_store
from transformers import LlamaConfig, LlamaForCausalLM

from configs.operation import TrainPlaceConfig
from configs.requests import ReplayRequest
from flows.operations.replay import check
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.errors import InputError
from millrace.runs.record import latest_attempt, resume_run
from millrace.runtime.arguments import attempt_config


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    tokenizer = character_tokenizer(["0123456789+="])
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "start")
    return train_and_store(tmp_path / "run", tmp_path / "start", len(tokenizer))


def test_a_replay_trains_on_this_host_with_its_own_supervision(run: TrainedRun, tmp_path: Path) -> None:
    placed = attempt_config(latest_attempt(run.store)).model_dump(mode="json")
    placed["placement"]["train"] |= {"work_pool": "training", "hosts": 2, "network": "10.0.0.0/24"}
    placed["training"]["parallel"]["data"] = 2
    placed["weights"]["transport"] = "store"
    resume_run(run.store, placed)
    request = ReplayRequest(sources=[str(run.folder)], job="train", run_id="again", root=str(tmp_path / "replays"))
    config = check(request)
    assert config.placement.train == TrainPlaceConfig()
    assert config.training.parallel.data == 2
    verifying = request.model_copy(update={"job": "verify", "settings": ["supervision.hang_seconds=900"]})
    assert check(verifying).supervision.hang_seconds == 900


def test_all_sources_are_rescored_by_the_reward_but_those_with_another_setting(run: TrainedRun, tmp_path: Path) -> None:
    sources = {"sums": {}, "words": {"scoring": {"reward": "math", "answer_pattern": "#(.*)"}}, "rest": {}}
    as_mixture(run, sources)
    request = ReplayRequest(
        sources=[str(run.folder)],
        rescore="exact_match",
        settings=["sources.rest.scoring.reward=math"],
        run_id="again",
        root=str(tmp_path / "replays"),
    )
    config = check(request)
    assert config.scoring.reward == "exact_match"
    scoring = {name: source.scoring for name, source in config.by_source().items()}
    assert {name: section.reward for name, section in scoring.items()} == {
        "sums": "exact_match",
        "words": "exact_match",
        "rest": "math",
    }
    assert scoring["words"].answer_pattern == "#(.*)"


def test_a_reward_that_can_not_rescore_a_source_names_it(run: TrainedRun, tmp_path: Path) -> None:
    as_mixture(run)
    request = ReplayRequest(
        sources=[str(run.folder)],
        rescore="exact_match",
        settings=["sources.words.scoring.reward=maths"],
        run_id="again",
        root=str(tmp_path / "replays"),
    )
    with pytest.raises(InputError) as raised:
        check(request)
    assert raised.value.key == "sources.words.scoring.reward"


def test_a_replay_can_not_train_with_a_teacher_whose_rows_are_not_stored(run: TrainedRun, tmp_path: Path) -> None:
    settings = ["teachers.expert.path=start", "training.distillation.teacher=expert"]
    request = ReplayRequest(
        sources=[str(run.folder)], job="train", settings=settings, run_id="again", root=str(tmp_path / "replays")
    )
    with pytest.raises(InputError) as raised:
        check(request)
    assert (raised.value.key, raised.value.read) == ("training.distillation.teacher", "expert")


def test_a_replay_can_not_train_with_more_likeliest_tokens_than_are_stored(run: TrainedRun, tmp_path: Path) -> None:
    stored = attempt_config(latest_attempt(run.store)).model_dump(mode="json")
    stored["teachers"] = {"expert": {"path": "start", "replicas": 1}}
    stored["training"]["distillation"] |= {"teacher": "expert", "top_k": 4}
    resume_run(run.store, stored)
    request = ReplayRequest(sources=[str(run.folder)], job="train", run_id="again", root=str(tmp_path / "replays"))
    for top_k in ("null", "3", "4"):
        check(request.model_copy(update={"settings": [f"training.distillation.top_k={top_k}"]}))
    with pytest.raises(InputError) as raised:
        check(request.model_copy(update={"settings": ["training.distillation.top_k=5"]}))
    assert (raised.value.key, raised.value.read) == ("training.distillation.top_k", "5")
