"""The config of a replay, from its source's and its own settings."""

from pathlib import Path

from support.replay.trained_run import train_and_store
from transformers import LlamaConfig, LlamaForCausalLM

from configs.operation import TrainPlaceConfig
from configs.requests import ReplayRequest
from flows.operations.replay import check
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.runs.record import latest_attempt, resume_run
from millrace.runtime.arguments import attempt_config


def test_a_replay_trains_on_this_host_with_its_own_supervision(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(["0123456789+="])
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "start")
    run = train_and_store(tmp_path / "run", tmp_path / "start", len(tokenizer))
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
