"""The check of GPUs: each part has an outcome, and a report names what failed."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Check, check
from configs.load import load_config
from millrace.doctor.machine import Machine, TorchDevices

ROOT = Path(__file__).parents[2]


def part(program: str, **needs: Any) -> Check:
    return Check(name="a part", shows="It works.", command=("-c", program), **needs)


def test_a_part_that_ends_with_0_passed_and_its_figures_are_kept() -> None:
    result = check(part("open('{out}/figures.json', 'w').write('3'); print('done')"), 1)
    assert (result.outcome, result.figures, result.output) == ("passed", "3", "done")


def test_a_part_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(1); pathlib.Path({str(file)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert check(part(program, minutes=0.3 / 60), 1).outcome == "too slow"
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)
    assert not file.exists()


@pytest.mark.parametrize("needs", [{"gpus": 2}, {"package": "no_such_package"}])
def test_a_part_is_left_out_where_something_is_missing(needs: dict[str, Any]) -> None:
    assert check(part("raise SystemExit(1)", **needs), 1).outcome == "left out"


@pytest.mark.parametrize(
    ("last_line", "outcome"), [("1 passed, 1 skipped in 2.00s", "passed"), ("2 skipped in 0.10s", "left out")]
)
def test_tests_that_were_all_skipped_did_not_pass(last_line: str, outcome: str) -> None:
    tests = Check(name="tests", shows="It works.", command=("-c", f"print('{last_line}')", "pytest"))
    assert check(tests, 1).outcome == outcome


def test_a_failed_part_stops_no_other_and_its_output_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("runs")
    machine.__dict__["torch_devices"] = TorchDevices(num_gpus=1, num_peers=0, nccl="", cuda="13.0")
    failing = replace(part("print('a line\\n' * 500); raise SystemExit('no kernel image')"), name="first")
    monkeypatch.setattr(gpu_check, "PARTS", [failing, replace(part("pass"), name="second")])
    monkeypatch.setattr(gpu_check, "Machine", lambda root: machine)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "report.txt")])
    assert gpu_check.main() == 1
    report = (tmp_path / "report.txt").read_text()
    rows = {line.split()[0]: line.split()[1:] for line in report.splitlines() if line.startswith(("first ", "second "))}
    assert rows["first"][0] == "failed" and rows["second"][0] == "passed"
    assert rows["first"][2] == rows["second"][2] == "never"
    assert report.endswith("no kernel image")
    assert report.count("a line") < 100


def test_parts_have_unique_names_and_cover_every_test_of_gpus() -> None:
    words = {word for each in PARTS for word in each.command}
    assert len({each.name for each in PARTS}) == len(PARTS)
    for word in words:
        if word.startswith(("tests/", "configs/")):
            assert (ROOT / word).exists(), word
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py")} <= words


def test_the_campaigns_configs_are_valid_and_use_every_gpu() -> None:
    for campaign in (each for each in PARTS if "flows.cli.main" in each.command):
        settings = campaign.command[campaign.command.index("--set") + 1 :]
        config = load_config(ROOT / campaign.command[3], list(settings))
        assert config.training.device == "cuda" or config.generation.replicas == campaign.gpus, campaign.name


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_sentence_and_ends_with_2(tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr.count("\n"), out.exists()) == (2, 1, False)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="only without a GPU's driver")
def test_without_a_gpu_make_installs_nothing_and_ends_with_2(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    ended = subprocess.run(["make", f"VENV={venv}", "gpu-check"], capture_output=True, cwd=ROOT)
    assert (ended.returncode, venv.exists()) == (2, False)
