"""Teachers are checked before a run: their folder, and their tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.errors import InputError
from millrace.models.loading import save_model
from millrace.preflight.teacher import check_context, check_same_tokenizer, check_teacher

KEY = "teachers.expert.path"


@pytest.fixture
def policy(tmp_path: Path, make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast) -> Path:
    save_model(make_model(1), tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


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


def test_a_teacher_whose_context_is_shorter_than_the_sequences_is_refused(policy: Path) -> None:
    context = json.loads((policy / "config.json").read_text())["max_position_embeddings"]
    check_context("expert", str(policy), context)
    check_context("expert", "start", context + 1)
    with pytest.raises(InputError) as caught:
        check_context("expert", str(policy), context + 1)
    assert caught.value.key == KEY


@pytest.mark.parametrize("missing", ["", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_no_model_is_refused(policy: Path, tmp_path: Path, missing: str) -> None:
    if missing:
        shutil.copytree(policy, tmp_path / "expert")
        (tmp_path / "expert" / missing).unlink()
    with pytest.raises(InputError) as caught:
        check_teacher("expert", str(tmp_path / "expert"), policy)
    assert caught.value.key == KEY
