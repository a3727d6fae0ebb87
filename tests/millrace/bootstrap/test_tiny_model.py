"""The start model that a campaign makes for itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.prompts import EnvironmentConfig, PromptsConfig
from configs.recipe import Recipe
from millrace.bootstrap.tiny_model import CHECK_EVERY, bootstrap, character_tokenizer
from millrace.generation.environments.calculator import Calculator
from millrace.models.loading import load_model, load_tokenizer
from millrace.prompts.dataset import load_prompts
from millrace.prompts.sums import chain_prompts
from millrace.types import Prompt

SHAPE = Recipe(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=32,
    error_rate=0.5,
    target_imitation_rate=1.0,
    max_accuracy=1.0,
    max_steps=10,
    batch_size=8,
    learning_rate=1e-3,
)


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return load_prompts(PromptsConfig(num_eval=16)).train


def made(prompts: tuple[Prompt, ...], folder: Path, seed: int = 0, shape: Recipe = SHAPE) -> list[str]:
    lines: list[str] = []
    bootstrap(prompts, shape, folder, seed=seed, max_new_tokens=4, report=lambda step, line: lines.append(line))
    return lines


def test_it_saves_a_folder_that_transformers_loads(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    made(prompts, tmp_path / "start")
    model, tokenizer = load_model(tmp_path / "start", "float32"), load_tokenizer(tmp_path / "start")
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == len(tokenizer)
    tokens = tokenizer("12+07=")["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "12+07="
    assert len(tokens) == len("12+07=") + 1, "a token a character, after the beginning-of-sequence token"


def test_every_character_is_a_token() -> None:
    text = "one\n\ntwo\r\n  é"
    tokenizer = character_tokenizer([text])
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.pad_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert set(tokenizer.get_vocab()) == {"<pad>", "<bos>", "<eos>", *text}


def test_one_seed_makes_one_model_and_another_makes_another(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made(prompts, tmp_path / name, seed)
        weights.append(load_model(tmp_path / name, "float32").get_input_embeddings().weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_it_goes_on_while_the_model_is_not_imitating_or_right_too_often(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    at_once = replace(SHAPE, target_imitation_rate=0.0, max_steps=50)
    assert made(prompts, tmp_path / "at-once", shape=at_once) == []
    looks = 50 // CHECK_EVERY
    assert len(made(prompts, tmp_path / "right", shape=replace(at_once, max_accuracy=-1.0))) == looks
    assert len(made(prompts, tmp_path / "blurred", shape=replace(at_once, target_imitation_rate=1.0))) == looks


def test_in_an_environment_it_learns_the_calls_and_not_the_answers(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    folder = tmp_path / "start"
    always = replace(SHAPE, error_rate=0.0, max_steps=60, learning_rate=1e-2)
    bootstrap(
        prompts,
        always,
        folder,
        seed=0,
        max_new_tokens=16,
        report=lambda step, line: None,
        environment=EnvironmentConfig(name="calculator", max_turns=2),
    )
    model, tokenizer = load_model(folder, "float32"), load_tokenizer(folder)
    assert set(Calculator.alphabet) <= set(tokenizer.get_vocab())

    def likeliest(text: str) -> str:
        logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits
        return str(tokenizer.decode([int(logits[0, -1].argmax())]))

    assert likeliest("12+07=") == "<"
    assert likeliest("12+07=<12+07") == ">"
    assert likeliest("12+07=<12+07>19|19") == "<eos>"
    # Only the calculator ever writes it.
    assert likeliest("12+07=<12+07>19") != "|"


def test_it_learns_chains_of_sums_with_every_character_they_are_written_in(tmp_path: Path) -> None:
    prompts = [prompt for prompt in chain_prompts() if prompt.text < "13"]
    lines: list[str] = []
    shape = replace(SHAPE, max_steps=100, learning_rate=1e-2)
    bootstrap(
        prompts,
        shape,
        tmp_path / "start",
        seed=0,
        max_new_tokens=100,
        report=lambda step, line: lines.append(line),
    )
    # A measurement samples 100 tokens one by one: the longer the responses, the rarer it is.
    steps = [line.split(":")[0] for line in lines]
    assert steps == [f"warm start step {step} of at most 100" for step in (25, 50, 75, 100)]
    model, tokenizer = load_model(tmp_path / "start", "float32"), load_tokenizer(tmp_path / "start")
    assert set(tokenizer.get_vocab()) == {"<pad>", "<bos>", "<eos>", *"0123456789", "+", "=", ":", " "}
    logits = model(input_ids=torch.tensor([tokenizer("03:7+5=2 02:5")["input_ids"]])).logits
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == "+"
    assert model.config.max_position_embeddings >= len("12:7+5=") + 100
