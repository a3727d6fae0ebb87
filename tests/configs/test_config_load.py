"""Loading: each mistake names file or --set, key, what was read and what was expected."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError, UserError
from configs.load import load_config
from configs.losses import AipoConfig, GspoConfig, PpoClipConfig
from configs.schema import RunConfig

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_text


def mistakes_of(path: Path, *overrides: str) -> tuple[UserError, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert all(mistake.expected for mistake in caught.value.mistakes)
    return caught.value.mistakes


def test_what_the_file_leaves_out_takes_its_default(write: Write) -> None:
    assert load_config(write("training: {max_steps: 3}")) == RunConfig.model_validate({"training": {"max_steps": 3}})


def test_an_override_wins_over_the_file_and_the_last_one_over_all(write: Write) -> None:
    path = write("seed: 1\ntraining: {max_steps: 3}")
    assert load_config(path, ["seed=2", "training.max_steps=4", "seed=5"]).seed == 5
    assert load_config(path, ["training.max_steps=4"]).training.max_steps == 4


def test_an_override_reaches_sections_that_the_file_leaves_out(write: Write) -> None:
    config = load_config(write("training: {max_steps: 3}"), ["model.warm_start_steps=32"])
    assert config.model.warm_start_steps == 32


@pytest.mark.parametrize("written", ["2e-4", "2.0e-4", "0.0002", ".0002", "2E-4"])
def test_numbers_may_be_written_in_any_usual_way(write: Write, written: str) -> None:
    in_file = load_config(write(f"training: {{max_steps: 3, learning_rate: {written}}}"))
    by_override = load_config(write("training: {max_steps: 3}"), [f"training.learning_rate={written}"])
    assert in_file.training.learning_rate == by_override.training.learning_rate == 2e-4


@pytest.mark.parametrize("pattern", [r"#### (-?\d+)", "[0-9] ([a-z]+)", "a: (b)", "{(x)}", "(=)", "- (x)"])
def test_an_override_takes_a_regular_expression_as_it_is(write: Write, pattern: str) -> None:
    config = load_config(write("training: {max_steps: 3}"), [f"scoring.answer_pattern={pattern}"])
    assert config.scoring.answer_pattern == pattern


def test_an_override_in_quotes_is_text(write: Write) -> None:
    assert load_config(write("training: {max_steps: 3}"), ["name='12'"]).name == "12"


def test_an_override_sets_a_list_or_a_mapping_written_as_in_the_file(write: Write) -> None:
    overrides = ["training.lora.target_modules=[q_proj, v_proj]", "scoring.weights={math: 1, exact_match: 0.5}"]
    overrides += ["prompts.reasoning_gym.config.chain_sum={max_digits: 2}", "prompts.source=reasoning_gym:chain_sum"]
    overrides += ["generation.engine=vllm", "generation.engine_args.cudagraph_capture_sizes=[1, 2]"]
    config = load_config(write("training: {max_steps: 3}"), overrides)
    assert config.training.lora.target_modules == ["q_proj", "v_proj"]
    assert config.scoring.weights == {"math": 1, "exact_match": 0.5}
    assert config.prompts.reasoning_gym.config == {"chain_sum": {"max_digits": 2}}
    assert config.generation.engine_args == {"cudagraph_capture_sizes": [1, 2]}


@pytest.mark.parametrize(
    "line",
    ["answer_pattern: #### (-?[0-9]+)", "answer_pattern: # (x)", "answer_pattern:  # (x)", "answer_pattern: (x) ## y"],
)
def test_text_that_a_comment_would_cut_off_has_to_be_quoted(write: Write, line: str) -> None:
    path = write(f"training: {{max_steps: 3}}\nscoring:\n  {line}")
    [mistake] = mistakes_of(path)
    assert mistake.file == str(path)
    assert mistake.read.startswith("line 3, column 3: answer_pattern is cut off by #")


def test_comments_behind_values_and_before_sections_are_comments(write: Write) -> None:
    text = "training: # how\n  max_steps: 3  ## steps\n  device: cpu # here\nscoring:\n  answer_pattern:\n# none\n"
    assert load_config(write(text + "  weights: {} # no\n  model: '#' ## it\n")).scoring.model == "#"


@pytest.mark.parametrize("null", ["", "null", "~"])
def test_an_override_can_take_a_value_back(write: Write, null: str) -> None:
    path = write("model: {path: some/folder}\ntraining: {max_steps: 3}")
    assert load_config(path, [f"model.path={null}"]).model.path is None


def test_arguments_of_vllm_may_have_any_name_of_its_own_in_the_file_and_by_override(write: Write) -> None:
    generation = "{engine: vllm, engine_args: {max_model_len: 64, compilation_config: {mode: 0}}}"
    path = write(f"training: {{max_steps: 3}}\ngeneration: {generation}")
    overrides = ["generation.engine_args.max_model_len=128", "generation.engine_args.enforce_eager=true"]
    assert load_config(path, overrides).generation.engine_args == {
        "max_model_len": 128,
        "compilation_config": {"mode": 0},
        "enforce_eager": True,
    }


VALUES_IN_FILES = {
    "training: {}": ("training.max_steps", "missing"),
    "seed: 1": ("training", "missing"),
    "training:": ("training", "empty"),
    "weights: 3\ntraining: {max_steps: 3}": ("weights", "3"),
    "training: {max_steps: ten}": ("training.max_steps", '"ten"'),
    "training: {max_steps: '3'}": ("training.max_steps", '"3"'),
    "training: {max_steps: [3]}": ("training.max_steps", "a list"),
    "training: {max_steps: {a: 3}}": ("training.max_steps", "a section"),
    "training: {max_steps: 010}": ("training.max_steps", '"010"'),
    "training: {max_steps: 3, max_grad_norm: 1e999}": ("training.max_grad_norm", "Infinity"),
    "training: {max_steps: 3, loss: 'my_losses:'}": ("training.loss.name", '"my_losses:"'),
    "training: {max_steps: 3, loss: 3}": ("training.loss", "3"),
    "training: {max_steps: 3, loss: {name: gspo, clip_low: 2}}": ("training.loss.clip_low", "2"),
    "training: {max_steps: 3, advantage: gae}": ("training.advantage", '"gae"'),
    "training: {max_steps: 3}\nprompts: {chat: no}": ("prompts.chat", '"no"'),
    "training: {max_steps: 3}\nscoring: {answer_pattern: 'a+'}": ("scoring.answer_pattern", '"a+"'),
    "training: {max_steps: 3}\nscoring: {answer_pattern: '(a'}": ("scoring.answer_pattern", '"(a"'),
    "training: {max_steps: 1}\nscoring: {reward: weighted_sum, weights: {math: x}}": ("scoring.weights.math", '"x"'),
    "training: {max_steps: 3}\ngeneration: {engine: vllm, engine_args: 3}": ("generation.engine_args", "3"),
    "training: {max_steps: 3}\ngeneration: {engine: vllm, engine_args: {max-model-len: 64}}": (
        "generation.engine_args.max-model-len",
        "not settable",
    ),
}


@pytest.mark.parametrize("text", VALUES_IN_FILES, ids=lambda text: text[:60])
def test_a_wrong_value_in_the_file_is_named_with_its_key(write: Write, text: str) -> None:
    path = write(text)
    [mistake] = mistakes_of(path)
    assert (mistake.file, mistake.key, mistake.read) == (str(path), *VALUES_IN_FILES[text])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nseed: 2", "line 2, column 1"),
        ("training:\n  max_steps: 1\n  max_steps: 2", "line 3, column 3"),
        ("training:\n  3: 1", "line 2, column 3"),
        ("[1]: 1", "line 1, column 1"),
        ("a: [1,\nb: 2", "line 2, column 5"),
        ("seed: 1\n\x07", "line 2, column 1"),
        ("seed: !!python/name:os.system", "line 1, column 7"),
        ("a: " + "[" * 20_000, ""),
        ("", ""),
        ("- 1", ""),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_config_is_named_with_its_line(write: Write, text: str, line: str) -> None:
    path = write(text)
    [mistake] = mistakes_of(path)
    assert (mistake.file, mistake.key) == (str(path), None)
    assert mistake.read.startswith(line)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("training.lerning_rate=1", "training.learning_rate"),
        ("max_staleness=1", "staleness.max_staleness"),
        ("trainig.lerning_rate=1", "training.learning_rate"),
        ("training.max_steps.x=1", "training.max_steps"),
        ("training.group_size=4", "generation.group_size"),
        ("generation.engine_args.a.b=3", "generation.engine_args"),
        ("sed=3", "seed"),
        ("training.loss.clip_low=0.1", "one of name, max_importance_ratio"),
        ("training.clip_low=0.1", "training.loss.clip_low"),
        ("model.warm_start_step=0", "model.warm_start_steps"),
        ("weights.xyzzy=1", "one of weights.transport, weights.deadline_seconds"),
    ],
)
def test_an_unknown_key_gets_the_one_that_was_probably_meant(write: Write, override: str, meant: str) -> None:
    [mistake] = mistakes_of(write("training: {max_steps: 3}"), override)
    assert (mistake.file, mistake.key, mistake.read) == ("--set", override.partition("=")[0], "an unknown key")
    assert (mistake.expected or "").startswith(meant)


def test_an_unknown_key_in_the_file_gets_the_one_that_was_probably_meant(write: Write) -> None:
    path = write("trainig: {}\ntraining: {max_steps: 3, max_step: 4}")
    assert {(mistake.file, mistake.key, mistake.expected) for mistake in mistakes_of(path)} == {
        (str(path), "trainig", "training"),
        (str(path), "training.max_step", "training.max_steps"),
    }


VALUES_IN_OVERRIDES = {
    "seed=x": ("seed", '"x"'),
    f"seed={'9' * 5000}": ("seed", f'"{"9" * 78}…'),
    "name=3": ("name", "3"),
    "name=a/b": ("name", '"a/b"'),
    "name='a": ("name", '"\'a"'),
    "training=1": ("training", "a section"),
    "training.max_steps": (None, '"training.max_steps"'),
    "=1": (None, '"=1"'),
    "prompts.curriculum_window=0": ("prompts.curriculum_window", "0"),
    "training.lora.target_modules=[a": ("training.lora.target_modules", '"[a"'),
    "training.lora.target_modules=q_proj": ("training.lora.target_modules", '"q_proj"'),
    "training.lora.target_modules=[1]": ("training.lora.target_modules.0", "1"),
    "generation.engine_args.seed=3": ("generation.engine_args.seed", "not settable"),
    "generation.engine_args.=3": ("generation.engine_args.", "not settable"),
}


@pytest.mark.parametrize("override", VALUES_IN_OVERRIDES, ids=lambda override: override[:40])
def test_a_wrong_override_is_named_with_its_key(write: Write, override: str) -> None:
    [mistake] = mistakes_of(write("training: {max_steps: 3}"), override)
    assert (mistake.file, mistake.key, mistake.read) == ("--set", *VALUES_IN_OVERRIDES[override])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.max_steps=0", "greater than or equal to 1"),
        ("training.max_steps=x", "a valid integer"),
        ("generation.dtype=fp8", "'auto', 'float32' or 'bfloat16'"),
        ("generation.engine_args=3", "a section with names and values"),
        ("generation.engine_args.dtype=float16", "another argument, because Millrace sets this one"),
        ("model.path=''", "have at least 1 character"),
    ],
)
def test_what_was_expected_is_read_from_the_schema(write: Write, override: str, expected: str) -> None:
    [mistake] = mistakes_of(write("training: {max_steps: 3}"), override)
    assert mistake.expected == expected


def test_a_loss_that_is_named_alone_takes_parameters_by_override(write: Write) -> None:
    path = write("training: {max_steps: 3, loss: ppo_clip}")
    assert load_config(path, ["training.loss.clip_high=0.28"]).training.loss == PpoClipConfig(clip_high=0.28)
    assert load_config(path, ["training.loss.clip_high=0.28", "training.loss=aipo"]).training.loss == AipoConfig()
    loaded = load_config(path, ["training.loss={name: gspo, clip_low: 1e-3}"]).training.loss
    assert loaded == GspoConfig(clip_low=1e-3)


def test_a_named_section_can_be_made_by_overrides(write: Write) -> None:
    path = write("training: {max_steps: 3}")
    sets = load_config(path, ["evaluation.sets.easy.source=x.jsonl", "evaluation.sets.easy.samples=4"]).evaluation.sets
    assert {name: part.model_dump() for name, part in sets.items()} == {
        "easy": {"source": "x.jsonl", "num_prompts": 256, "samples": 4}
    }
    [mistake] = mistakes_of(path, "evaluation.sets.easy.source=x.jsonl", "evaluation.sets.easy.sample=4")
    assert (mistake.key, mistake.expected) == ("evaluation.sets.easy.sample", "one of source, num_prompts, samples")


def test_every_mistake_is_reported_on_its_own_line(write: Write) -> None:
    path = write("sed: 3\ntraining: {max_steps: 0}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["oops", "generation.top_p=2", "weights.xyzzy=1"])
    mistakes = caught.value.mistakes
    assert [(mistake.file, mistake.key) for mistake in mistakes] == [
        ("--set", None),
        ("--set", "weights.xyzzy"),
        ("--set", "generation.top_p"),
        (str(path), "training.max_steps"),
        (str(path), "sed"),
    ]
    assert str(caught.value).splitlines() == [str(mistake) for mistake in mistakes]


def test_impossible_combinations_name_the_file_and_that_it_was_overridden(write: Write) -> None:
    path = write("training: {max_steps: 3}\ngeneration: {replicas: 3}")
    keys = ["training.groups_per_step", "generation.groups_per_batch"]
    assert [(mistake.file, mistake.key) for mistake in mistakes_of(path, "generation.groups_per_batch=999")] == [
        (f"{path} with --set", key) for key in keys
    ]
    assert [mistake.file for mistake in mistakes_of(path)] == [str(path)]


def test_an_override_into_something_that_is_no_section_leaves_the_error_of_the_file(write: Write) -> None:
    path = write("weights: 3\ntraining: {max_steps: 3}")
    [mistake] = mistakes_of(path, "weights.transport=store")
    assert (mistake.file, mistake.key, mistake.read) == (str(path), "weights", "3")


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    missing, latin = tmp_path / "missing.yaml", tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9")
    for path in (missing, tmp_path, latin):
        [mistake] = mistakes_of(path)
        assert mistake.file == str(path)
