"""A person's mistakes: one clear sentence, exit code 2, and no half-made run."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, REPOSITORY, Millrace

from flows.cli.main import main

VLLM_PRESET = REPOSITORY / "configs" / "presets" / "tiny-vllm-cpu.yaml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def refused(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, config: Path = PRESET) -> str:
    """What the command says; it must have left nothing behind."""
    before = sorted(root.rglob("*")) if root.exists() else []
    code = main(["run", str(config), "--root", str(root), *arguments])
    assert code == 2
    assert (sorted(root.rglob("*")) if root.exists() else []) == before
    said = capsys.readouterr().err
    assert said.startswith("millrace: ")
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.learning_rat=0.1", ["training.learning_rat", "training.learning_rate"]),
        ("trainning.max_steps=3", ["trainning", "training"]),
        ("training.max_steps=many", ["training.max_steps", "many"]),
        ("generation.group_size=1", ["generation.group_size"]),
        ("training.groups_per_step=7", ["training.groups_per_step"]),
        ("scoring.reward=telepathy", ["telepathy", "exact_match"]),
        ("prompts.num_eval=100000", ["prompts.num_eval"]),
        ("environment.name=abacus", ["environment.name", "abacus", "calculator"]),
        ("environment.name=no_such_package.abacus:Abacus", ["environment.name", "No module named 'no_such_package'"]),
    ],
)
def test_a_wrong_key_value_or_combination_is_named(
    capsys: pytest.CaptureFixture[str], root: Path, setting: str, expected: list[str]
) -> None:
    extra = ["--set", "generation.replicas=2"] if "groups_per_step" in setting else []
    said = refused(capsys, root, "--set", setting, *extra)
    for word in expected:
        assert word in said


def test_a_config_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert "nowhere.yaml" in refused(capsys, root, config=Path("nowhere.yaml"))


@pytest.mark.parametrize("run_id", ["a/b", "..", "../up", "a\nb", "", ".hidden", "x" * 200])
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
    said = refused(capsys, root, "--set", f"model.path={folder}")
    assert str(folder) in said
    assert "tokenizer.json" in said


def test_a_model_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert "/no/such/model" in refused(capsys, root, "--set", "model.path=/no/such/model")


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
    said = refused(capsys, root, "--set", f"prompts.source={prompts}")
    assert "sums.jsonl" in said
    assert expected in said


def test_arguments_of_vllm_without_vllm_are_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    said = refused(capsys, root, "--set", "generation.engine_args.max_model_len=64")
    assert "generation.engine is transformers" in said
    assert "max_model_len" in said


def test_an_argument_that_millrace_sets_is_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    said = refused(capsys, root, "--set", "generation.engine_args.dtype=half", config=VLLM_PRESET)
    assert "generation.dtype" in said


@pytest.mark.vllm
@pytest.mark.extended
def test_heads_that_vllms_attention_does_not_know_are_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    said = refused(capsys, root, "--set", "model.bootstrap.num_heads=6", config=VLLM_PRESET)
    assert "16 features" in said
    assert "32, 64" in said


def test_a_root_that_can_not_be_written_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # A file in its place stops root, too, whom permissions do not.
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = main(["run", str(PRESET), "--root", str(blocked / "runs"), "--run-id", "a"])
    assert code == 2
    assert str(blocked) in capsys.readouterr().err


def test_a_store_of_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert main(["run", str(PRESET), "--root", "gopher://somewhere/runs"]) == 2
    assert "gopher" in capsys.readouterr().err


INPUTS = {"prompts.source arithmetic": "12 prompts 0a1b2c3d4e5f"}


def a_run(root: Path) -> None:
    """A run as its controller leaves it before anything else has happened."""
    from configs.load import load_config
    from flows.campaign.prepare import prepare

    shutil.rmtree(
        prepare(load_config(PRESET, [f"storage.root={root}"]), "taken", resume="never", inputs=INPUTS).handover
    )


def test_a_run_id_that_is_taken_is_refused_unless_resumed(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    a_run(root)
    assert "--resume" in refused(capsys, root, "--run-id", "taken")


def test_resuming_with_another_config_names_what_may_not_change(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    a_run(root)
    said = refused(capsys, root, "--run-id", "taken", "--resume", "--set", "training.learning_rate=0.1")
    assert "training.learning_rate" in said
    assert "0.1" in said


def test_resuming_with_other_inputs_names_them_and_the_flag_that_accepts_them(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    a_run(root)
    said = refused(capsys, root, "--run-id", "taken", "--resume")
    assert "prompts.source arithmetic was 12 prompts 0a1b2c3d4e5f and is 5,050 prompts" in said
    assert "--accept-changed-inputs" in said


def test_resuming_a_run_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert "run.json" in refused(capsys, root, "--run-id", "ghost", "--resume")
    assert "--run-id" in refused(capsys, root, "--resume")


def test_the_status_of_no_run_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prefect_server_that_does_not_answer_is_named(root: Path) -> None:
    ended = Millrace(root, {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"}).run(
        "run", str(PRESET), "--root", str(root), "--run-id", "a"
    )
    assert ended.code == 2, ended.output
    assert "http://127.0.0.1:9/api" in ended.output
    assert "Traceback" not in ended.output
    assert not (root / "a").exists()
