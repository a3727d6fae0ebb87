"""Output of `millrace plan`."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from flows.cli.main import USER_ERROR, main

PRESET = str(Path(__file__).parents[3] / "configs" / "presets" / "qwen3-8b-8gpu.yaml")
H100 = ["--hardware", "h100", "--gpus", "4", "--model", "qwen2.5-1.5b", "--steps", "10", "--lengths", "200,0.5,150"]


@pytest.mark.slow
def test_a_plan_is_printed_and_its_config_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Longer than a line of the terminal.
    written, everything = tmp_path / f"{'plan' * 25}.yaml", tmp_path / "plan.json"
    options = ["--price", "2.5", "--write", str(written), "--json", str(everything)]
    assert main(["plan", PRESET, *H100, *options]) == 0
    output = capsys.readouterr().out
    for words in (
        "trainer GPUs",
        "staleness",
        "GPU-hours",
        "a day",
        "runners-up",
        "× the time",
        "assumptions",
        "--lengths",
    ):
        assert words in output
    assert f"millrace run {written}\n" in output
    values = json.loads(everything.read_text())
    assert load_config(written).training.parallel.data == values["changes"]["training.parallel.data"]
    assert values["dollars_per_gpu_hour"] == 2.5


def test_json_alone_can_be_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, *H100, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 4


def test_a_what_if_shows_both_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--hardware", "h100", "--model", "qwen2.5-1.5b", "--steps", "10"]
    assert main(["plan", PRESET, *machine, "--what-if", "generation.replicas=2", "staleness.max_staleness=4"]) == 0
    output = capsys.readouterr().out
    assert "as it is" in output
    assert "generation.replicas=2" in output
    assert "runners-up" not in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "expected --hardware with --gpus, or --from with a stored run"),
        (["--hardware", "h100", "--model", "llama-8b"], "--gpus is missing; expected how many GPUs"),
        (["--hardware", "tpu", "--gpus", "8", "--model", "llama-8b"], "tpu"),
        (["--hardware", "h100", "--gpus", "8", "--model", "gpt-9"], "gpt-9"),
        (["--hardware", "h100", "--gpus", "8"], "models/qwen3-8b"),
        (["--hardware", "h100", "--gpus", "8", "--model", "llama-405b"], "llama-405b on h100"),
        (["--from", "runs/x", "--gpus", "8"], "expected no --hardware, --gpus and --lengths with it"),
        (["--from", "runs/none"], "runs/none"),
        (
            ["--hardware", "h100", "--model", "llama-8b", "--what-if", "generation.replica=2"],
            "--what-if: generation.replica",
        ),
    ],
)
def test_a_user_error_is_one_line(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PRESET, "--steps", "10", *options]) == USER_ERROR
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("millrace: ")
    assert sentence in streams.err
    assert len(streams.err.splitlines()) == 1
