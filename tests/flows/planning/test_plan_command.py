"""`millrace plan` at a terminal."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from flows.cli.main import USER_ERROR, main

PRESET = str(Path(__file__).parents[3] / "configs" / "presets" / "gsm8k-qwen-gpu.yaml")
H100 = ["--hardware", "h100", "--gpus", "4", "--model", "qwen2.5-1.5b", "--steps", "10", "--lengths", "200,0.5,150"]


@pytest.mark.slow
def test_a_plan_is_printed_and_its_config_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Longer than a line of the terminal.
    written, everything = tmp_path / f"{'plan' * 25}.yaml", tmp_path / "plan.json"
    options = ["--price", "2.5", "--write", str(written), "--json", str(everything)]
    assert main(["plan", PRESET, *H100, *options]) == 0
    said = capsys.readouterr().out
    for words in (
        "trainer GPUs",
        "staleness",
        "GPU-hours",
        "a day",
        "runners-up",
        "× slower",
        "assumptions",
        "--lengths",
    ):
        assert words in said
    assert f"millrace run {written}\n" in said
    found = json.loads(everything.read_text())
    assert load_config(written).training.parallel.data == found["changes"]["training.parallel.data"]
    assert found["dollars_per_gpu_hour"] == 2.5


def test_json_alone_can_be_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, *H100, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 4


def test_a_what_if_shows_both_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--hardware", "h100", "--model", "qwen2.5-1.5b", "--steps", "10"]
    assert main(["plan", PRESET, *machine, "--what-if", "generation.replicas=2", "staleness.max_staleness=2"]) == 0
    said = capsys.readouterr().out
    assert "as it is" in said
    assert "generation.replicas=2" in said
    assert "runners-up" not in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "on which machine? Expected --hardware with --gpus, or --from with a stored run"),
        (["--hardware", "h100", "--model", "llama-8b"], "how many GPUs? Expected --gpus"),
        (["--hardware", "tpu", "--gpus", "8", "--model", "llama-8b"], 'no figures of the hardware "tpu"'),
        (["--hardware", "h100", "--gpus", "8", "--model", "gpt-9"], 'the sizes of "gpt-9" are not known'),
        (["--hardware", "h100", "--gpus", "8"], "/path/to/Qwen2.5-1.5B-Instruct: its config.json can't be read"),
        (["--hardware", "h100", "--gpus", "8", "--model", "llama-405b"], "llama-405b on h100 does not fit 8 GPUs"),
        (["--from", "runs/x", "--gpus", "8"], "expected no --hardware, --gpus and --lengths with it"),
        (
            ["--hardware", "h100", "--model", "llama-8b", "--what-if", "generation.replica=2"],
            "--what-if: generation.replica",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, "--steps", "10", *options]) == USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("millrace: ")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


def test_a_run_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, "--from", str(tmp_path / "none")]) == USER_ERROR
    assert str(tmp_path / "none") in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--gpus", "0"],
        ["--gpus", "many"],
        ["--lengths", "1,2"],
        ["--lengths", "a,b,c"],
        ["--price", "-1"],
        ["--goal", "x"],
    ],
)
def test_an_option_that_can_not_be_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", PRESET, "--hardware", "h100", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err
