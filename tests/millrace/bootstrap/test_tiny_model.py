"""The start model that a campaign makes for itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.recipe import Recipe
from configs.task import EnvironmentConfig, PromptsConfig
from millrace.bootstrap.tiny_model import CHECK_EVERY, Lesson, bootstrap, character_tokenizer
from millrace.errors import InputError
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
    learn({"default": Lesson(prompts=prompts, recipe=shape, max_new_tokens=4)}, folder, seed, lines)
    return lines


def learn(lessons: dict[str, Lesson], folder: Path, seed: int = 0, lines: list[str] | None = None) -> str:
    """Bootstraps a model of the last lesson's shape."""
    kept = [] if lines is None else lines
    shape = list(lessons.values())[-1].recipe
    return bootstrap(lessons, shape, folder, seed=seed, report=lambda step, line: kept.append(line))


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
    calculator = EnvironmentConfig(name="calculator", max_turns=2)
    learn({"default": Lesson(prompts=prompts, recipe=always, max_new_tokens=16, environment=calculator)}, folder)
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
    lesson = Lesson(prompts=prompts, recipe=shape, max_new_tokens=100)
    learn({"default": lesson}, tmp_path / "start", lines=lines)
    # A measurement samples 100 tokens one by one: the longer the responses, the rarer it is.
    steps = [line.split(":")[0] for line in lines]
    assert steps == [f"warm start step {step} of at most 100" for step in (25, 50, 75, 100)]
    model, tokenizer = load_model(tmp_path / "start", "float32"), load_tokenizer(tmp_path / "start")
    assert set(tokenizer.get_vocab()) == {"<pad>", "<bos>", "<eos>", *"0123456789", "+", "=", ":", " "}
    logits = model(input_ids=torch.tensor([tokenizer("03:7+5=2 02:5")["input_ids"]])).logits
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == "+"
    assert model.config.max_position_embeddings >= len("12:7+5=") + 100


# --- several sources


def test_sources_share_one_model_and_each_has_its_own_environment(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    shape = replace(SHAPE, error_rate=0.0, max_steps=150, batch_size=16, learning_rate=1e-2)
    chains = [prompt for prompt in chain_prompts() if prompt.text < "03"]
    calculator = EnvironmentConfig(name="calculator", max_turns=2)
    lessons = {
        "chains": Lesson(prompts=chains, recipe=shape, max_new_tokens=12),
        "tool": Lesson(prompts=prompts, recipe=shape, max_new_tokens=16, environment=calculator),
    }
    lines: list[str] = []
    summary = learn(lessons, tmp_path / "start", lines=lines)
    assert all("chains answers" in line and "tool answers" in line for line in lines)
    assert "chains " in summary
    model, tokenizer = load_model(tmp_path / "start", "float32"), load_tokenizer(tmp_path / "start")
    assert set(tokenizer.get_vocab()) >= {*"0123456789+=: ", *Calculator.alphabet}

    def likeliest(text: str) -> str:
        logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits
        return str(tokenizer.decode([int(logits[0, -1].argmax())]))

    assert likeliest("12+07=") == "<"
    assert likeliest("02:7+5=").isdigit()


@pytest.mark.parametrize(
    ("target", "batch_size", "shares"),
    [
        (1.0, 8, (4, 4)),
        (1.0, 16, (8, 4)),
        # The sums are learned at once.
        (0.0, 8, (2, 7)),
    ],
)
def test_sources_give_equal_parts_of_their_batches_and_fewer_once_learned(
    prompts: tuple[Prompt, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: float,
    batch_size: int,
    shares: tuple[int, int],
) -> None:
    asked: list[str] = []

    def note(prompt: Prompt, *arguments: object) -> list[tuple[str, bool]]:
        asked.append(prompt.source)
        return [(prompt.answer, True)]

    monkeypatch.setattr("millrace.bootstrap.tiny_model.dialogue", note)
    shape = replace(SHAPE, max_steps=1)
    sums = replace(shape, target_imitation_rate=target, batch_size=batch_size)
    lessons = {
        "sums": Lesson(prompts=prompts, recipe=sums, max_new_tokens=4),
        "chains": Lesson(prompts=chain_prompts()[:20], recipe=shape, max_new_tokens=4),
    }
    learn(lessons, tmp_path / "start")
    assert (asked.count("arithmetic"), asked.count("chains")) == shares


def test_the_warm_start_ends_when_every_source_is_learned(prompts: tuple[Prompt, ...], tmp_path: Path) -> None:
    at_once, never = (replace(SHAPE, target_imitation_rate=rate, max_steps=50) for rate in (0.0, 1.0))
    lines: list[str] = []
    lessons = {
        name: Lesson(prompts=prompts, recipe=recipe, max_new_tokens=4)
        for name, recipe in (("easy", at_once), ("hard", never))
    }
    learn(lessons, tmp_path / "start", lines=lines)
    assert len(lines) == 50 // CHECK_EVERY


def test_an_environment_that_converses_is_refused_and_its_source_named(
    prompts: tuple[Prompt, ...], tmp_path: Path
) -> None:
    tool = EnvironmentConfig(name="calculator_tool")
    with pytest.raises(InputError) as caught:
        learn({"chat": Lesson(prompts=prompts, recipe=SHAPE, max_new_tokens=4, environment=tool)}, tmp_path / "start")
    assert caught.value.key == "sources.chat.environment.name"
