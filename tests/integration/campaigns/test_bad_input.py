"""A person's mistakes: one clear sentence, exit code 2, and no half-made run."""

import json
import os
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, REPOSITORY, Millrace

from configs.load import load_config
from flows.campaign.prepare import claim
from flows.cli.main import main

VLLM_PRESET = REPOSITORY / "configs" / "presets" / "tiny-vllm-cpu.yaml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def refused(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, config: Path = PRESET) -> str:
    """Runs the command, which must refuse and leave nothing behind. Returns its message."""
    before = sorted(root.rglob("*"))
    assert main(["run", str(config), "--root", str(root), *arguments]) == 2
    assert sorted(root.rglob("*")) == before
    message = capsys.readouterr().err
    assert message.startswith("millrace: ")
    assert "Traceback" not in message
    return message


MISTAKES: list[tuple[str, list[str]]] = [
    ("--set training.learning_rat=0.1", ["training.learning_rat", "training.learning_rate"]),
    ("--set trainning.max_steps=3", ["trainning", "training"]),
    ("--set training.max_steps=many", ["training.max_steps", "many"]),
    ("--set generation.group_size=1", ["generation.group_size"]),
    ("--set training.groups_per_step=7 generation.replicas=2", ["training.groups_per_step"]),
    ("--set scoring.reward=telepathy", ["telepathy", "exact_match"]),
    ("--set prompts.num_eval=100000", ["prompts.num_eval"]),
    ("--set environment.name=abacus", ["environment.name", "abacus", "calculator"]),
    ("--set environment.name=no_such_package.abacus:Abacus", ["environment.name", "no_such_package"]),
    ("--set model.path=/no/such/model", ["/no/such/model"]),
    ("--set generation.engine_args.max_model_len=64", ["generation.engine", "max_model_len"]),
    ("--run-id ghost --resume", ["run.json"]),
    ("--resume", ["--run-id"]),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], root: Path, arguments: str, named: list[str]) -> None:
    message = refused(capsys, root, *arguments.split())
    assert [word for word in named if word not in message] == []


def test_a_config_that_is_missing_or_sets_what_millrace_sets_is_refused(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert "nowhere.yaml" in refused(capsys, root, config=Path("nowhere.yaml"))
    message = refused(capsys, root, "--set", "generation.engine_args.dtype=half", config=VLLM_PRESET)
    assert "generation.engine_args.dtype" in message


@pytest.mark.parametrize("run_id", ["a/b", "..", "a\nb", "", ".hidden", "x" * 200])
def test_a_run_id_that_could_not_be_a_folder_is_refused(
    capsys: pytest.CaptureFixture[str], root: Path, run_id: str
) -> None:
    assert "\n" not in refused(capsys, root, "--run-id", run_id).strip()


def test_a_model_folder_without_a_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"")
    message = refused(capsys, root, "--set", f"model.path={folder}")
    assert str(folder) in message
    assert "tokenizer.json" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "sums.jsonl"),
        ('{"prompt": "1+1=", "answer": "2"}\nnot json\n', "line 2"),
        ('{"prompt": "1+1="}\n', "line 1"),
    ],
)
def test_an_empty_or_malformed_prompts_file_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path, text: str, expected: str
) -> None:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text(text)
    message = refused(capsys, root, "--set", f"prompts.source={prompts}")
    assert "sums.jsonl" in message
    assert expected in message


def test_a_root_that_cannot_be_used_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # A file in its place stops root, too, whom permissions do not.
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["run", str(PRESET), "--root", str(blocked / "runs"), "--run-id", "a"]) == 2
    assert str(blocked) in capsys.readouterr().err
    assert main(["run", str(PRESET), "--root", "gopher://somewhere/runs"]) == 2
    assert "gopher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["--resume"]),
        ("--resume --set training.learning_rate=0.1", ["training.learning_rate", "0.1"]),
        ("--resume", ["prompts.source arithmetic", "--accept-changed-inputs"]),
    ],
)
def test_a_run_that_exists_is_not_resumed_with_another_config_or_inputs(
    capsys: pytest.CaptureFixture[str], root: Path, arguments: str, named: list[str]
) -> None:
    config = load_config(PRESET, [f"storage.root={root}"])
    inputs = {"prompts.source arithmetic": "12 prompts 0a1b2c3d4e5f"}
    # A run as its controller leaves it before anything else has happened.
    claim(config, "taken", resume="never", inputs=inputs)
    message = refused(capsys, root, "--run-id", "taken", *arguments.split())
    assert [word for word in named if word not in message] == []


def test_the_status_of_no_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prefect_server_that_does_not_answer_is_named(root: Path) -> None:
    millrace = Millrace(root, {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"})
    ended = millrace.run("run", str(PRESET), "--root", str(root), "--run-id", "a")
    ended.expect_refusal()
    assert "http://127.0.0.1:9/api" in ended.output
    assert not (root / "a").exists()
