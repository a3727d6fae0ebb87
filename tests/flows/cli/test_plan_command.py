"""Output of `millrace plan`."""

import json
import re
import shlex
from pathlib import Path

import pytest

from configs.load import load_config
from flows.cli.main import USER_ERROR, main

ROOT = Path(__file__).parents[3]
PRESET = str(ROOT / "configs" / "presets" / "qwen3-8b-8gpu.yaml")
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/presets/*gpu.yaml")), ids=lambda path: path.stem)
def test_a_presets_header_has_the_figures_that_its_command_prints(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line.removeprefix("#") for line in path.read_text().splitlines(True) if line.startswith("#")]
    header = "".join(lines).replace("\\\n", "")
    (command,) = re.findall(r"millrace (plan .*)", header)
    assert main([*shlex.split(command), "--json", "-"]) == 0
    plan, changed = json.loads(capsys.readouterr().out)["entries"]
    memory, idle = plan["memory_bytes_per_gpu"], plan["outcome"]["idle"]

    def figure(pattern: str) -> float:
        (text,) = re.findall(pattern, header)
        return float(text.replace(",", ""))

    assert figure(r"step +([\d.]+) s") == pytest.approx(plan["outcome"]["step_seconds"], rel=0.03)
    if "with the change of --what-if" in header and "as long with" not in header:
        assert figure(r"step .*, or ([\d.]+) s") == pytest.approx(changed["outcome"]["step_seconds"], rel=0.03)
    assert figure(r"speed +([\d,]+) response tokens") == pytest.approx(plan["outcome"]["tokens_per_second"], rel=0.03)
    assert figure(r"idle +generate (\d+)%") == pytest.approx(100 * idle["generate"], abs=0.51)
    assert figure(r"idle .*train (\d+)%") == pytest.approx(100 * idle["train"], abs=0.51)
    assert figure(r"memory +trainer (\d+)") == pytest.approx(memory["trainer"] / 2**30, abs=0.51)
    assert figure(r"memory .*generator (\d+)") == pytest.approx(memory["generator"] / 2**30, abs=0.51)


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
