"""Loading: one clear sentence per error, naming file or --set, key, what was found and what was expected."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import RunConfig

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_text


def validation_errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path), "FILE").splitlines()


def test_what_the_file_leaves_out_takes_its_default(write: Write) -> None:
    assert load_config(write("training: {max_steps: 3}")) == RunConfig.model_validate({"training": {"max_steps": 3}})


def test_an_override_wins_over_the_file_and_the_last_one_over_all(write: Write) -> None:
    path = write("seed: 1\ntraining: {max_steps: 3}")
    assert load_config(path, ["seed=2", "training.max_steps=4", "seed=5"]).seed == 5
    assert load_config(path, ["training.max_steps=4"]).training.max_steps == 4


def test_an_override_reaches_sections_that_the_file_leaves_out(write: Write) -> None:
    config = load_config(write("training: {max_steps: 3}"), ["model.bootstrap.hidden_size=32"])
    assert config.model.bootstrap.hidden_size == 32


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
    [sentence] = validation_errors(write(f"training: {{max_steps: 3}}\nscoring:\n  {line}"))
    assert sentence == (
        "FILE: line 3, column 3: answer_pattern is cut off by # (quote text that holds #, or write null); expected a "
        "YAML file"
    )


def test_comments_behind_values_and_before_sections_are_comments(write: Write) -> None:
    text = "training: # how\n  max_steps: 3  ## steps\n  device: cpu # here\nscoring:\n  answer_pattern:\n# none\n"
    assert load_config(write(text + "  function: null # no\n  model: '#' ## it\n")).scoring.model == "#"


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


def test_an_override_gives_arguments_of_vllm_to_a_file_without_any(write: Write) -> None:
    path = write("training: {max_steps: 3}\ngeneration: {engine: vllm}")
    assert load_config(path, ["generation.engine_args.block_size=64"]).generation.engine_args == {"block_size": 64}


FILE_ERRORS = {
    "training: {max_steps: 3}\nmodel: {bootstrap: {slip_rate: 0.5}}": (
        "FILE: key model.bootstrap.slip_rate is now model.bootstrap.error_rate"
    ),
    "training: {max_steps: 3, max_step: 4}": "FILE: unknown key training.max_step; did you mean training.max_steps?",
    "trainig: {}\ntraining: {max_steps: 3}": "FILE: unknown key trainig; did you mean training?",
    "training: {max_steps: 3, group_size: 4}": (
        "FILE: unknown key training.group_size; did you mean generation.group_size?"
    ),
    "weights: {xyzzy: 3}\ntraining: {max_steps: 3}": (
        "FILE: unknown key weights.xyzzy; expected one of weights.transport, weights.host, "
        "weights.deadline_seconds, weights.probe_tolerance"
    ),
    "training: {}": "FILE: training.max_steps is missing; expected a whole number of at least 1",
    "seed: 1": "FILE: training is missing; expected a section with training.max_steps",
    "training:": "FILE: training is empty; expected a section with training.max_steps",
    "weights: 3\ntraining: {max_steps: 3}": "FILE: weights is 3; expected a section with keys of its own",
    "training: {max_steps: ten}": 'FILE: training.max_steps is "ten"; expected a whole number of at least 1',
    "training: {max_steps: '3'}": 'FILE: training.max_steps is "3"; expected a whole number of at least 1',
    "training: {max_steps: [3]}": "FILE: training.max_steps is a list; expected a whole number of at least 1",
    "training: {max_steps: {a: 3}}": "FILE: training.max_steps is a section; expected a whole number of at least 1",
    "training: {max_steps: 010}": 'FILE: training.max_steps is "010"; expected a whole number of at least 1',
    "training: {max_steps: 3}\nstorage: {fsync: no}": 'FILE: storage.fsync is "no"; expected true or false',
    "training: {max_steps: 3}\nmodel: {path: 3}": (
        "FILE: model.path is 3; expected text of at least one character or null"
    ),
    "training: {max_steps: 3}\nmodel: {dtype: float16}": (
        'FILE: model.dtype is "float16"; expected "float32" or "bfloat16"'
    ),
    "training: {max_steps: 3}\ngeneration: {top_p: 0}": (
        "FILE: generation.top_p is 0; expected a finite number above 0 and at most 1"
    ),
    "training: {max_steps: 3}\ngeneration: {dtype: fp8}": (
        'FILE: generation.dtype is "fp8"; expected "auto" or "float32" or "bfloat16" or null'
    ),
    "training: {max_steps: 3}\nweights: {transport: nccl}": (
        'FILE: weights.transport is "nccl"; expected "shm" or "direct" or "store"'
    ),
    "training: {max_steps: 3}\nweights: {probe_tolerance: 0}": (
        "FILE: weights.probe_tolerance is 0; expected a finite number above 0 or null"
    ),
    "training: {max_steps: 3}\ngeneration: {engine: vlm}": (
        'FILE: generation.engine is "vlm"; expected "transformers" or "vllm"'
    ),
    "training: {max_steps: 3}\ngeneration: {engine: vllm, engine_args: 3}": (
        "FILE: generation.engine_args is 3; expected a section with names and values"
    ),
    "training: {max_steps: 3}\ngeneration: {engine: vllm, engine_args: {dtype: float16}}": (
        "FILE: generation.engine_args.dtype can't be set; expected generation.dtype, the number format of the weights "
        "in generators"
    ),
    "training: {max_steps: 3}\ngeneration: {engine: vllm, engine_args: {max-model-len: 64}}": (
        "FILE: generation.engine_args.max-model-len can't be set; expected the name of an argument as vLLM's Python "
        "interface spells it, such as tensor_parallel_size"
    ),
    "training: {max_steps: 3}\ngeneration: {engine_args: {max_model_len: 64, enforce_eager: true}}": (
        "FILE: generation.engine is transformers and generation.engine_args has max_model_len, enforce_eager; expected "
        "no arguments, or the engine vllm"
    ),
    "training: {max_steps: 3}\ngeneration: {replicas: 1025}": (
        "FILE: generation.replicas is 1025; expected a whole number of at least 1 and at most 1024"
    ),
    "training: {max_steps: 3, max_importance_ratio: 0.5}": (
        "FILE: training.max_importance_ratio is 0.5; expected a finite number of at least 1"
    ),
    "training: {max_steps: 3, loss: grpo}": (
        'FILE: training.loss is "grpo"; expected "aipo" or "reinforce" or "ppo_clip" or "decoupled_ppo" or "tis" or '
        '"sequence_tis" or "icepop" or "sequence_mask" or "geometric_mask" or "cispo" or "gspo" or "sapo" or '
        '"dppo_tv" or "topr" or package.module:function'
    ),
    "training: {max_steps: 3, losses: {icepop: {low: 1.5}}}": (
        "FILE: training.losses.icepop.low is 1.5; expected a finite number above 0 and at most 1"
    ),
    "training: {max_steps: 3, losses: {ppo_clip: {dual_clip: 1}}}": (
        "FILE: training.losses.ppo_clip.dual_clip is 1; expected a finite number above 1 or null"
    ),
    "training: {max_steps: 3, kl: {coefficient: -0.1}}": (
        "FILE: training.kl.coefficient is -0.1; expected a finite number of at least 0"
    ),
    "training: {max_steps: 3, advantage: gae}": (
        'FILE: training.advantage is "gae"; expected "group_mean" or "leave_one_out" or "grpo" or '
        '"reinforce_plus_plus" or "reinforce_plus_plus_baseline" or "maxrl" or package.module:function'
    ),
    "training: {max_steps: 3, loss: 'my_losses:'}": (
        'FILE: training.loss is "my_losses:"; expected "aipo" or "reinforce" or "ppo_clip" or "decoupled_ppo" or "tis" '
        'or "sequence_tis" or "icepop" or "sequence_mask" or "geometric_mask" or "cispo" or "gspo" or "sapo" or '
        '"dppo_tv" or "topr" or package.module:function'
    ),
    "training: {max_steps: 3, masks: {min_token_ratio: 2}}": (
        "FILE: training.masks.min_token_ratio is 2; expected a finite number above 0 and at most 1 or null"
    ),
    "training: {max_steps: 3, non_finite: skip}": ('FILE: training.non_finite is "skip"; expected "refuse" or "mask"'),
    "training: {max_steps: 3, clip_low: 1.5}": (
        "FILE: training.clip_low is 1.5; expected a finite number above 0 and at most 1"
    ),
    "training: {max_steps: 3, max_grad_norm: 1e999}": (
        "FILE: training.max_grad_norm is Infinity; expected a finite number above 0"
    ),
    "training: {max_steps: 3}\nscoring: {reward: python}": (
        "FILE: scoring.reward is python and scoring.function is missing; expected package.module:function"
    ),
    "training: {max_steps: 3}\nscoring: {reward: weighted_sum, weights: {reward_model: 1}}": (
        "FILE: scoring.reward is weighted_sum and scoring.model is missing; expected the folder of a reward model"
    ),
    "training: {max_steps: 3}\nscoring: {reward: weighted_sum}": (
        "FILE: scoring.reward is weighted_sum and scoring.weights is missing; expected a weight for each reward to add"
    ),
    "training: {max_steps: 3}\nscoring: {answer_pattern: 'a+'}": (
        'FILE: scoring.answer_pattern is "a+"; expected a regular expression with a group (...) around the answer'
    ),
    "training: {max_steps: 3}\nscoring: {answer_pattern: '(a'}": (
        'FILE: scoring.answer_pattern is "(a"; expected a regular expression, but this one does not compile '
        "(missing ), unterminated subpattern at position 0)"
    ),
    "training: {max_steps: 3}\ngeneration: {replicas: 3}": (
        "FILE: training.groups_per_step is 64 and generation.replicas is 3; expected groups_per_step to be a multiple "
        "of replicas, so that all generators make equally many groups"
    ),
    "": "FILE: the file is empty; expected sections with their keys",
    "- 1": "FILE: the file is a list; expected sections with their keys",
    "seed: 1\nseed: 2": 'FILE: line 2, column 1: key "seed" stands twice; expected a YAML file',
    "training:\n  max_steps: 1\n  max_steps: 2": (
        'FILE: line 3, column 3: key "max_steps" stands twice; expected a YAML file'
    ),
    "training:\n  3: 1": "FILE: line 2, column 3: a key is not text; expected a YAML file",
    "[1]: 1": "FILE: line 1, column 1: a key is not text; expected a YAML file",
    "a: [1,\nb: 2": "FILE: line 2, column 5: expected ',' or ']', but got '<stream end>'; expected a YAML file",
    "a: " + "[" * 20_000: "FILE: lists or sections are nested too deeply; expected a YAML file",
    "training: {max_steps: 1}\nscoring: {reward: weighted_sum, weights: {math: x}}": (
        'FILE: scoring.weights.math is "x"; expected a finite number'
    ),
    "seed: 1\n\x07": "FILE: line 2, column 1: special characters are not allowed; expected a YAML file",
    "seed: !!python/name:os.system": (
        "FILE: line 1, column 7: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'; expected a YAML file"
    ),
}


@pytest.mark.parametrize("text", FILE_ERRORS, ids=lambda text: text[:30])
def test_an_error_in_the_file_gets_its_sentence(write: Write, text: str) -> None:
    [sentence] = validation_errors(write(text))
    assert sentence == FILE_ERRORS[text]


OVERRIDE_ERRORS = {
    "prompts.curriculum.window=0": (
        "--set: prompts.curriculum.window is 0; expected a whole number of at least 1 or null"
    ),
    "prompts.curriculum.easy_weight=0": (
        "--set: prompts.curriculum.easy_weight is 0; expected a finite number above 0 and at most 1"
    ),
    "prompts.curriculum.hard_weight=2": (
        "--set: prompts.curriculum.hard_weight is 2; expected a finite number above 0 and at most 1"
    ),
    "model.bootstrap.target_fluency=1": (
        "--set: key model.bootstrap.target_fluency is now model.bootstrap.target_imitation_rate"
    ),
    "training.lerning_rate=1": "--set: unknown key training.lerning_rate; did you mean training.learning_rate?",
    "max_staleness=1": "--set: unknown key max_staleness; did you mean staleness.max_staleness?",
    "trainig.lerning_rate=1": "--set: unknown key trainig.lerning_rate; did you mean training.learning_rate?",
    "training.max_steps.x=1": "--set: unknown key training.max_steps.x; did you mean training.max_steps?",
    "training=1": "--set: training is a section; expected section.key=value with one of its keys",
    "training.max_steps": '--set: found "training.max_steps"; expected section.key=value',
    "=1": '--set: found "=1"; expected section.key=value',
    "seed=x": '--set: seed is "x"; expected a whole number of at least 0 and at most 4294967295',
    f"seed={'9' * 5000}": f'--set: seed is "{"9" * 78}…; expected a whole number of at least 0 and at most 4294967295',
    "name=3": "--set: name is 3; expected text",
    "name=a/b": (
        "--set: name is \"a/b\"; expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
    ),
    "name='a": ('--set: name is "\'a"; expected one YAML value (line 1, column 3: found unexpected end of stream)'),
    "generation.engine_args.seed=3": (
        "--set: generation.engine_args.seed can't be set; expected seed, from which each request draws its own"
    ),
    "generation.engine_args.=3": (
        "--set: generation.engine_args. can't be set; expected the name of an argument as vLLM's Python interface "
        "spells it, such as tensor_parallel_size"
    ),
    "generation.engine_args.a.b=3": (
        "--set: unknown key generation.engine_args.a.b; did you mean generation.engine_args?"
    ),
    "training.lora.target_modules=[a": (
        "--set: training.lora.target_modules is \"[a\"; expected one YAML value (line 1, column 3: expected ',' or "
        "']', but got '<stream end>')"
    ),
    "training.lora.target_modules=q_proj": (
        '--set: training.lora.target_modules is "q_proj"; expected a list such as [a, b], whose items are text of at '
        "least one character"
    ),
    "evaluation.sets=3": "--set: evaluation.sets is 3; expected a section with names and values",
    "evaluation.sets.easy=3": "--set: evaluation.sets.easy is 3; expected a section with source",
    "evaluation.sets.easy.source=3": (
        "--set: evaluation.sets.easy.source is 3; expected text of at least one character"
    ),
    "evaluation.sets.easy.samples=3": (
        "FILE: evaluation.sets.easy.source is missing; expected text of at least one character"
    ),
    "evaluation.sets.held_out.source=x": (
        "FILE: evaluation.sets is a section; expected names of 1 to 32 letters, digits, '_' and '-', the first a "
        "letter, other than held_out; found 'held_out'"
    ),
    "generation.engine_args=": "--set: generation.engine_args is empty; expected a section with names and values",
    "scoring.weights.math=high": '--set: scoring.weights.math is "high"; expected a finite number',
    "storage.root=": "--set: storage.root is empty; expected text of at least one character",
    "generation.groups_per_batch=999": (
        "FILE with --set: generation.groups_per_batch is 999 and training.groups_per_step is 64; "
        "expected groups_per_batch to be at most 320, the groups that a staleness of up to 4 allows"
    ),
}


@pytest.mark.parametrize("override", OVERRIDE_ERRORS, ids=lambda override: override[:30])
def test_an_error_in_an_override_gets_its_sentence(write: Write, override: str) -> None:
    assert validation_errors(write("training: {max_steps: 3}"), override) == [OVERRIDE_ERRORS[override]]


def test_a_named_section_can_be_made_by_overrides(write: Write) -> None:
    path = write("training: {max_steps: 3}")
    sets = load_config(path, ["evaluation.sets.easy.source=x.jsonl", "evaluation.sets.easy.samples=4"]).evaluation.sets
    assert {name: one.model_dump() for name, one in sets.items()} == {
        "easy": {"source": "x.jsonl", "num_prompts": 256, "samples": 4}
    }
    assert validation_errors(path, "evaluation.sets.easy.source=x.jsonl", "evaluation.sets.easy.sample=4") == [
        "--set: unknown key evaluation.sets.easy.sample; expected one of source, num_prompts, samples"
    ]


def test_every_error_is_reported_on_its_own_line(write: Write) -> None:
    path = write("sed: 3\ntraining: {max_steps: 0}")
    assert validation_errors(path, "oops", "generation.top_p=2", "weights.xyzzy=1", "generation.lerning_rate=1") == [
        '--set: found "oops"; expected section.key=value',
        "--set: unknown key weights.xyzzy; expected one of weights.transport, weights.host, "
        "weights.deadline_seconds, weights.probe_tolerance",
        "--set: unknown key generation.lerning_rate; did you mean training.learning_rate?",
        "--set: generation.top_p is 2; expected a finite number above 0 and at most 1",
        "FILE: training.max_steps is 0; expected a whole number of at least 1",
        "FILE: unknown key sed; did you mean seed?",
    ]


def test_several_impossible_combinations_are_reported_one_a_line(write: Write) -> None:
    sentences = validation_errors(write("training: {max_steps: 3}\ngeneration: {replicas: 3, groups_per_batch: 999}"))
    assert [sentence.split(" ")[1] for sentence in sentences] == [
        "training.groups_per_step",
        "generation.groups_per_batch",
    ]


def test_an_override_into_something_that_is_no_section_leaves_the_error_of_the_file(write: Write) -> None:
    path = write("weights: 3\ntraining: {max_steps: 3}")
    [sentence] = validation_errors(path, "weights.transport=store")
    assert sentence == "FILE: weights is 3; expected a section with keys of its own"


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    missing, latin = tmp_path / "missing.yaml", tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9")
    assert validation_errors(missing) == ["FILE: can't be read (No such file or directory); expected a YAML file"]
    assert validation_errors(tmp_path) == ["FILE: can't be read (Is a directory); expected a YAML file"]
    assert validation_errors(latin) == ["FILE: byte 9 is not UTF-8; expected a YAML file in UTF-8"]
