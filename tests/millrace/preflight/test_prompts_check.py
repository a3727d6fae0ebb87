"""Prompts that can't be put to the model are refused before anything runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat.model_folder import chat_model_folder
from support.chat.tokenizers import TEMPLATES

from configs.schema import ModelConfig
from configs.task import EnvironmentConfig, PromptsConfig
from millrace.errors import InputError
from millrace.preflight.child import ask
from millrace.preflight.prompts import check_prompts, longest_prompt
from millrace.prompts.dataset import load_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model_folder(tmp_path_factory.mktemp("chat") / "model")


def ask_in_this_process(module: str, question: Any, what: str) -> Any:
    """Start no child process, whose start takes longer than the check."""
    return longest_prompt(json.loads(json.dumps(question)))


def checked(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    folder: Path | None,
    *,
    context: int | None = 2048,
    vocab_size: int | None = None,
    model: dict[str, Any] | None = None,
    environment: str | None = None,
    ask: Callable[[str, Any, str], Any] = ask_in_this_process,
    **prompts: Any,
) -> int | None:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(json.dumps({"answer": "1", **row}) for row in rows))
    config = PromptsConfig(source=str(path), num_eval=1, **prompts)
    return check_prompts(
        ModelConfig(path=None if folder is None else str(folder), **(model or {})),
        config,
        EnvironmentConfig(name=environment),
        load_prompts(config),
        context=context,
        vocab_size=vocab_size,
        max_new_tokens=8,
        ask=ask,
    )


TEXT = [{"prompt": "2 + 3?"}, {"prompt": "4 + 4?"}, {"prompt": "1 + 1? Take your time."}]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXT]


@pytest.mark.extended
def test_the_longest_prompt_is_measured_as_the_policy_reads_it(tmp_path: Path, folder: Path) -> None:
    plain = checked(tmp_path, TEXT, folder)
    assert plain == len(TEXT[2]["prompt"])
    wrapped = checked(tmp_path, TEXT, folder, chat=True, response_prefix="It is", ask=ask)
    assert wrapped == checked(tmp_path, CHAT, folder, response_prefix="It is")
    marks = len("1user\n1\n1assistant\n")  # <|im_start|> and <|im_end|> are one token each.
    assert wrapped == plain + marks + len("It is")


FIXED_LENGTH = {"strategy": {"Fixed": 1000}, "direction": "Right", "pad_to_multiple_of": None}


@pytest.mark.parametrize(
    "ignored",
    [
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
        {"padding": {**FIXED_LENGTH, "pad_id": 0, "pad_type_id": 0, "pad_token": "0"}},
    ],
    ids=["truncation", "padding"],
)
def test_a_prompt_is_measured_without_truncation_or_padding(ignored: dict[str, Any], tmp_path: Path) -> None:
    folder = chat_model_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ignored}))
    assert checked(tmp_path, TEXT, folder) == len(TEXT[2]["prompt"])


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    folder = chat_model_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"] = {"q": 0}
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        checked(tmp_path, TEXT, folder)
    assert (caught.value.file or "").startswith("prompt asked.jsonl:")


def test_bootstrap_makes_its_tokenizer_later(tmp_path: Path) -> None:
    assert checked(tmp_path, TEXT, None) is None


SHOWN = [{"messages": [*row["prompt"], {"role": "assistant", "content": "5."}]} for row in CHAT]


def test_demonstrations_are_measured_with_their_prompts(tmp_path: Path, folder: Path) -> None:
    assert checked(tmp_path, SHOWN, folder, demonstrations=True) == checked(tmp_path, CHAT, folder)


@pytest.mark.parametrize(
    ("content", "context", "part"),
    [
        ("A long answer.", 2048, "its demonstration has 15 tokens and generation.max_new_tokens is 8"),
        ("5.", 30, "no more than the context together, 30 tokens"),
    ],
)
def test_a_demonstration_that_is_too_long_is_refused(
    tmp_path: Path, folder: Path, content: str, context: int, part: str
) -> None:
    rows = [{"messages": [*row["prompt"], {"role": "assistant", "content": content}]} for row in CHAT]
    with pytest.raises(InputError) as caught:
        checked(tmp_path, rows, folder, context=context, demonstrations=True)
    assert (caught.value.file or "").startswith("prompt asked.jsonl:")
    assert part in str(caught.value)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("rows", "changes", "part"),
    [
        (TEXT, {"context": 20}, "prompt asked.jsonl:3: it has 22 tokens and generation.max_new_tokens is 8"),
        (TEXT, {"vocab_size": 40}, "the model knows 40 tokens"),
        (CHAT, {"vocab_size": 200}, "the model knows 200 tokens"),
        (TEXT, {"system_prompt": "a"}, "prompts.system_prompt is set"),
        (CHAT, {"template": "<{prompt}>"}, "prompts.template is set"),
        ([*CHAT, TEXT[0]], {}, "prompt asked.jsonl:4"),
        (CHAT, {"model": {"renderer": "qwen33"}}, "qwen33"),
        (CHAT, {"model": {"renderer": "llama-3"}}, "llama-3"),
        (CHAT, {"model": {"chat_template": "no.jinja"}}, "no.jinja"),
        (TEXT, {"tools": "no.json", "chat": True}, "no.json"),
        (CHAT, {"model": {"chat_template": str(TEMPLATES / "no_end.jinja")}}, "without a special token"),
        (
            CHAT,
            {
                "model": {"chat_template": str(TEMPLATES / "thoughts_forgotten.jinja")},
                "environment": "calculator_tool",
            },
            "environment.name is calculator_tool",
        ),
    ],
)
def test_a_prompt_that_can_not_be_used_is_refused_in_one_line(
    tmp_path: Path, folder: Path, rows: list[dict[str, Any]], changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(InputError) as caught:
        checked(tmp_path, rows, folder, **changes)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rows", "changes", "key"), [(CHAT, {}, "prompt asked"), (TEXT, {"chat": True}, "prompts.ch")])
def test_a_bootstrapped_model_has_no_chat_template(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError) as caught:
        checked(tmp_path, rows, None, **changes)
    assert (caught.value.key or "").startswith(key)


def test_a_conversation_that_its_template_refuses_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": "a"}, *row["prompt"]]} for row in CHAT]
    with pytest.raises(InputError) as caught:
        checked(tmp_path, rows, chat_model_folder(tmp_path / "gemma", "gemma"))
    assert "prompt asked.jsonl:" in str(caught.value)
    assert "System role not" in caught.value.read


def test_a_model_without_a_template_is_refused(tmp_path: Path, folder: Path) -> None:
    bare = chat_model_folder(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(InputError) as caught:
        checked(tmp_path, CHAT, bare)
    assert (caught.value.file or "").endswith("bare")
