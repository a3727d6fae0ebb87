"""Teachers are checked before a run: their folder, and their tokenizer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from configs.training import TeacherConfig
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.errors import InputError
from millrace.evaluation.promotion import PromotionDecision
from millrace.models.loading import save_model
from millrace.preflight.teacher import check_same_tokenizer, check_teacher, teacher_folder, teacher_inputs
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.stores.factory import open_store

KEY = "teachers.expert.path"


@pytest.fixture
def policy(tmp_path: Path, make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast) -> Path:
    save_model(make_model(1), tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def stored_run(root: Path, model: Path | None) -> Path:
    """A run whose promoted checkpoint is this model."""
    store = open_store(str(root))
    store.put(layout.RUN, b"{}")
    if model is not None:
        decision = PromotionDecision(policy_version=7, accuracy=1.0, bar=0.5, promoted=True, sentence="")
        state = {"decision": asdict(decision), "evaluation": {}, "incarnation": 0, "attempt": 0}
        files = {file.name: file.read_bytes() for file in model.iterdir()}
        CheckpointWriter(store, layout.PROMOTED, writer="promote").commit(7, files, state)
    return root


def inputs(path: Path | str) -> dict[str, str]:
    return teacher_inputs({"expert": TeacherConfig(path=str(path))})


def test_a_model_with_the_policys_tokenizer_is_a_teacher(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "expert")
    check_teacher("expert", str(tmp_path / "expert"), policy)
    assert check_same_tokenizer("expert", tmp_path / "expert", policy) == 15
    check_teacher("expert", "start", policy)


def test_another_tokenizer_is_refused(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "expert")
    character_tokenizer(["abcdefghijkl"]).save_pretrained(tmp_path / "expert")
    with pytest.raises(InputError) as caught:
        check_teacher("expert", str(tmp_path / "expert"), policy)
    assert caught.value.key == KEY
    assert "its token" in str(caught.value)


@pytest.mark.parametrize("missing", ["", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_no_model_is_refused(policy: Path, tmp_path: Path, missing: str) -> None:
    if missing:
        shutil.copytree(policy, tmp_path / "expert")
        (tmp_path / "expert" / missing).unlink()
    with pytest.raises(InputError) as caught:
        check_teacher("expert", str(tmp_path / "expert"), policy)
    assert caught.value.key == KEY


def test_the_promoted_checkpoint_of_a_run_is_a_teacher(policy: Path, tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", policy)
    check_teacher("expert", str(run), policy)
    with teacher_folder(f"file://{run}", None) as folder:
        assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert inputs(run)[f"{KEY} {run}"].startswith("promoted version 7 ")


def test_a_run_without_a_promoted_checkpoint_is_refused(policy: Path, tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", None)
    with pytest.raises(InputError, match="no checkpoint"):
        inputs(run)
    with pytest.raises(InputError, match="no checkpoint"):
        check_teacher("expert", str(run), policy)


def test_the_content_of_a_folder_is_an_input(policy: Path, tmp_path: Path) -> None:
    before = inputs(policy)
    (policy / "config.json").write_text((policy / "config.json").read_text() + " ")
    assert before.keys() == inputs(policy).keys() == {f"{KEY} {policy}"}
    assert before != inputs(policy)
    assert inputs("start") == {}
    with pytest.raises(InputError, match="can't be read"):
        inputs(tmp_path / "nowhere")
