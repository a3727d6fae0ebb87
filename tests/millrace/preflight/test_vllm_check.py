"""A config that vLLM refuses is refused in one sentence that names the key, before anything has started."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from support.campaigns.campaigns import REPOSITORY

from configs.generation import adapter_arguments
from configs.load import load_config
from configs.recipe import Recipe
from flows.campaign.prepare import check, claim
from millrace.bootstrap.tiny_model import Lesson, bootstrap
from millrace.preflight.vllm import Question, Requests
from millrace.types import Prompt

PRESET = REPOSITORY / "configs" / "presets" / "tiny-vllm-cpu.yaml"
TINY = Recipe(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    error_rate=0.5,
    target_imitation_rate=1.0,
    max_accuracy=1.0,
    max_steps=0,
    batch_size=1,
    learning_rate=1e-3,
)
REQUESTS = Requests(max_new_tokens=4, prompts=(("12+07=", "19"), ("1+1=", "2")), longest_prompt=None)
LONG = replace(REQUESTS, max_new_tokens=58)
GOOD = Question(
    folder=None,
    tiny=asdict(TINY),
    dtype="float32",
    engine_args={"max_model_len": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**24},
    replicas=1,
    requests={"default": REQUESTS},
)
TOO_MUCH = psutil.virtual_memory().total


def given(**engine_args: object) -> Question:
    """A good question, but for these arguments of vLLM."""
    return replace(GOOD, engine_args={**GOOD.engine_args, **engine_args})


REFUSED = {
    "unknown": (given(max_modellen=64), ["engine_args.max_modellen", "no argument", "expected max_model_len"]),
    "unlike any": (given(xyzzy=64), ["generation.engine_args.xyzzy", "no argument"]),
    "type": (given(max_model_len="long"), ['generation.engine_args.max_model_len is "long"', "integer"]),
    "bound": (given(max_num_seqs=0), ["generation.engine_args.max_num_seqs is 0", "greater than or equal to 1"]),
    "choice": (given(kv_cache_dtype="int99"), ['generation.engine_args.kv_cache_dtype is "int99"', "fp8"]),
    "nested": (given(compilation_config={"mode": 77}), ['generation.engine_args.compilation_config is {"mode": 77}']),
    "reason": (given(quantization="nope"), ['generation.engine_args.quantization is "nope"', "Unknown quantization"]),
    "parallel": (given(tensor_parallel_size=3), ["generation.engine_args.tensor_parallel_size is 3", "divisible"]),
    "beyond the model": (given(max_model_len=999), ["generation.engine_args.max_model_len is 999", "64"]),
    "block": (given(block_size=7), ["generation.engine_args.block_size is 7", "32"]),
    "short": (given(max_model_len=10), ["max_model_len is 10 tokens", "longest prompt has 7", "11 tokens"]),
    "short of itself": (
        replace(GOOD, engine_args={"kv_cache_memory_bytes": 2**24}, requests={"default": LONG}),
        ["the model's context is 64 tokens", "generation.max_new_tokens is 58", "65 tokens"],
    ),
    "heads": (
        replace(GOOD, tiny={**GOOD.tiny, "num_heads": 4}),
        ["model.path is null", "16 features", "expected one of 32, 64"],
    ),
    "cache": (given(kv_cache_memory_bytes=2 * TOO_MUCH), ["kv_cache_memory_bytes is", "GiB are free"]),
    "caches": (
        replace(given(kv_cache_memory_bytes=TOO_MUCH), replicas=2),
        ["kv_cache_memory_bytes is", "for each of 2 workers", "GiB are free"],
    ),
    "all memory": (
        replace(GOOD, engine_args={"gpu_memory_utilization": 1.0}),
        ["gpu_memory_utilization is 1.0 of all memory", "GiB are free", "generation.engine_args.kv_cache_memory_bytes"],
    ),
}
QUANTIZED = replace(given(quantization="fp8_per_channel"), dtype="bfloat16")
if not torch.cuda.device_count():
    REFUSED["turns on a CPU"] = (
        replace(GOOD, colocated=True),
        ["placement.colocated is true", "vLLM can't sleep on the device it finds here, cpu", "expected a GPU"],
    )
    REFUSED["no kernel on a CPU"] = (
        replace(QUANTIZED, engine_args={**QUANTIZED.engine_args, "quantization": "fp8"}),
        ['generation.engine_args.quantization is "fp8"', "on this CPU", "fp8_per_channel"],
    )
FOLDERS: dict[str, tuple[dict[str, object], list[str]]] = {
    "architecture": ({"architectures": ["XyzzyForCausalLM"]}, ["XyzzyForCausalLM", "not supported"]),
    "heads of a folder": ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}, ["16 features"]),
    "experts and sinks that are not loaded again": (
        {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4},
        ["gpt_oss", "experts and sinks", "generation.engine transformers"],
    ),
}
"""Changes to a good model folder's config.json, and parts of the error; the folder is named too."""


def ask(questions: dict[str, Question], answers: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("look_at_questions.py")), str(answers)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
        input=json.dumps({name: asdict(question) for name, question in questions.items()}),
        capture_output=True,
        text=True,
        check=False,
    )


def model_folder(folder: Path, changes: dict[str, object]) -> str:
    prompts = [Prompt(prompt_id="p", text="12+07=", answer="19", source="")]
    lessons = {"default": Lesson(prompts=prompts, recipe=TINY, max_new_tokens=4)}
    bootstrap(lessons, TINY, folder, seed=0, report=lambda step, line: print(line))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """vLLM's answer to every question of this file, by name."""
    folders = tmp_path_factory.mktemp("folders")
    questions = {name: question for name, (question, _) in REFUSED.items()}
    for name, changes in {"good folder": {}, **{name: changes for name, (changes, _) in FOLDERS.items()}}.items():
        questions[name] = replace(GOOD, folder=model_folder(folders / name.replace(" ", "-"), changes))
    # The model that bootstrap makes for an environment has a longer context.
    played = {"default": replace(LONG, environment="calculator")}
    questions["good in an environment"] = replace(REFUSED["short of itself"][0], requests=played)
    questions["good and quantized"] = QUANTIZED
    questions["good and truncated"] = replace(GOOD, truncates=True)
    adapters = adapter_arguments(4, ["q_proj"], max_staleness=4)
    questions["good with adapters"] = replace(GOOD, adapters=adapters)
    without_lora = model_folder(folders / "without-lora", {"architectures": ["GPTJForCausalLM"]})
    questions["adapters of a kind that vLLM does not serve"] = replace(GOOD, folder=without_lora, adapters=adapters)
    path = folders / "answers.json"
    done = ask({"good": GOOD, **questions}, path)
    assert done.returncode == 0, done.stderr
    errors: dict[str, str | None] = json.loads(path.read_text())
    return errors


@pytest.mark.vllm
@pytest.mark.parametrize("case", [*REFUSED, *FOLDERS])
def test_a_config_that_vllm_refuses_is_refused_in_one_sentence(answers: dict[str, str | None], case: str) -> None:
    said = answers[case]
    assert said is not None
    assert "\n" not in said
    expected = REFUSED[case][1] if case in REFUSED else [*FOLDERS[case][1], f"model.path is {os.sep}", "folders"]
    assert [part for part in expected if part not in said] == [], said


@pytest.mark.vllm
@pytest.mark.parametrize(
    "case",
    ["good", "good folder", "good in an environment", "good and truncated", "good and quantized", "good with adapters"],
)
def test_a_config_that_would_start_is_accepted(answers: dict[str, str | None], case: str) -> None:
    assert answers[case] is None


@pytest.mark.vllm
def test_a_model_whose_adapters_vllm_does_not_serve_is_refused(answers: dict[str, str | None]) -> None:
    said = answers["adapters of a kind that vLLM does not serve"]
    assert said is not None
    assert "training.lora.rank" in said


def test_the_parent_process_imports_neither_vllm_nor_torch() -> None:
    program = "import sys, flows.campaign.prepare; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_crash_of_vllm_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import sys, os; print('kernel panic', file=sys.stderr, flush=True); os._exit(3)")
    program = (
        "import json, sys\n"
        "from millrace.preflight.vllm import Question, Requests, check_vllm\n"
        "values = json.load(sys.stdin)\n"
        "requests = {name: Requests(**each) for name, each in values.pop('requests').items()}\n"
        "check_vllm(Question(**values, requests=requests))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])},
        input=json.dumps(asdict(GOOD)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "StageDied: the check of vLLM exited with code 3" in done.stderr
    assert "kernel panic" in done.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_the_preset_with_vllm_is_checked_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(PRESET, [f"storage.root={tmp_path}"])
    inputs = check(config, "a", resume="never")
    assert "checking generation.engine_args with vLLM" in capsys.readouterr().out
    claim(config, "a", resume="never", inputs=inputs)
    assert capsys.readouterr().out == ""
