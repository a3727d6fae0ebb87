"""`millrace init` writes a config that fits the file and the model."""

import json
from pathlib import Path

import pytest
from support.campaigns.command import run_command
from support.chat.model_folder import chat_model_folder

from configs.load import load_config
from configs.schema import RunConfig
from millrace.errors import InputError


def written(tmp_path: Path, rows: list[dict[str, object]], *words: str) -> RunConfig:
    data, config = tmp_path / "data.jsonl", tmp_path / "mine.yaml"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run_command("init", str(data), "--to", str(config), *words)[0] == 0
    return load_config(config)


def test_columns_format_and_reward_are_those_of_worked_solutions(tmp_path: Path) -> None:
    rows = [{"level": 1, "question": f"{n}+1?", "solution": f"so\n#### {n + 1}"} for n in range(30)]
    prompts = written(tmp_path, rows).prompts
    fields = (prompts.prompt_field, prompts.answer_field, prompts.answer_format, prompts.num_eval, prompts.chat)
    assert fields == ("question", "solution", "gsm8k", 3, False)


def test_words_are_compared_and_a_chat_model_is_asked_in_its_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    chat_model_folder(folder)
    rows = [{"prompt": "capital of France?", "answer": "Paris"}, {"prompt": "and of Italy?", "answer": "Rome"}]
    config = written(tmp_path, rows, "--model", str(folder))
    assert (config.model.path, config.prompts.chat, config.scoring.reward) == (str(folder), True, "exact_match")
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert 0 < config.generation.max_new_tokens < context


def test_a_file_without_answers_and_a_config_that_exists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        written(tmp_path, [{"prompt": "why?", "note": "because"}])
    assert caught.value.file == str(tmp_path / "data.jsonl")
    assert not (tmp_path / "mine.yaml").exists()
    (tmp_path / "mine.yaml").write_text("name: kept\n")
    with pytest.raises(InputError) as caught:
        written(tmp_path, [{"prompt": "1+1=", "answer": 2}])
    assert caught.value.file == str(tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "name: kept\n"


def test_a_damaged_model_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    chat_model_folder(folder)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{")
        with pytest.raises(InputError) as caught:
            written(tmp_path, [{"prompt": "1+1=", "answer": 2}], "--model", str(folder))
        assert caught.value.file == str(folder / name)
