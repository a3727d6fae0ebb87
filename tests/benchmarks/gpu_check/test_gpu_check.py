"""The check of GPUs: each part says what became of it, and the report says what had never been run."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check.checking import Equipment, Result, check, check_part, summary
from benchmarks.gpu_check.parts import COUNTS, FIGURES, OUT, PARTS, Part
from benchmarks.gpu_check.report import EARLIER, NEVER, passed_before, read, write
from configs.load import load_config

ONE_GPU = Equipment(gpus=1, installed=lambda name: None)
ROOT = Path(__file__).parents[3]
MACHINE: dict[str, Any] = {
    "time": "2026-11-23T12:00:00+00:00",
    "commit": "abc",
    "gpus": ["NVIDIA H100"],
    "doctor": {"lines": [{"group": "GPUs", "what": "links", "found": "NV18 between 1 pair"}]},
}


def part(program: str, **needs: Any) -> Part:
    return Part(name="a part", shows="It works.", command=("-c", program), **needs)


def test_a_part_that_ends_with_0_passed_and_its_figures_are_kept() -> None:
    program = f"open('{OUT}/{FIGURES}', 'w').write('{{\"rate\": 3}}'); print('done')"
    found = check_part(part(program), ONE_GPU)
    assert (found.outcome, found.figures, found.output) == ("passed", {"rate": 3}, "done")
    assert found.command.startswith("python -c ")


def test_a_part_that_fails_keeps_the_end_of_its_output() -> None:
    found = check_part(part("print('a line\\n' * 500); raise SystemExit('no kernel image')"), ONE_GPU)
    assert (found.outcome, found.reason) == ("failed", "exit code 1")
    assert found.output.endswith("no kernel image")
    assert len(found.output.splitlines()) == 60


def test_a_part_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(1); pathlib.Path({str(file)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = check_part(part(program, minutes=0.3 / 60), ONE_GPU)
    assert found.outcome == "too slow"
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)
    assert not file.exists()


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"gpus": 2}, "needs 2 GPUs, and there are 1"),
        ({"package": "vllm"}, "needs the package vllm, which is not installed"),
    ],
)
def test_a_part_is_left_out_where_something_is_missing(needs: dict[str, Any], reason: str) -> None:
    found = check_part(part("raise SystemExit(1)", **needs), ONE_GPU)
    assert (found.outcome, found.reason) == ("left out", reason)


@pytest.mark.parametrize(
    ("tests", "outcome", "words"),
    [
        ('tests="3" skipped="1" failures="0" errors="0"', "passed", "2 passed, 1 skipped"),
        ('tests="2" skipped="2" failures="0" errors="0"', "left out", "every test was skipped; 2 skipped"),
    ],
)
def test_tests_are_counted_and_none_that_ran_is_no_success(tests: str, outcome: str, words: str) -> None:
    report = f"<testsuites><testsuite {tests}/></testsuites>"
    found = check_part(part(f"open('{OUT}/{COUNTS}', 'w').write('''{report}''')"), ONE_GPU)
    assert found.outcome == outcome
    assert words in summary(found)


def test_a_part_that_fails_stops_no_other() -> None:
    said: list[str] = []
    parts = [replace(part("raise SystemExit(1)"), name="first"), replace(part("pass"), name="second")]
    assert [one.outcome for one in check(parts, ONE_GPU, said.append)] == ["failed", "passed"]
    assert said[0] == "[1/2] first …"
    assert said[-1].startswith("[2/2] second: passed in")


# ---- the report ----


def results() -> Sequence[Result]:
    broken = check_part(replace(part("raise SystemExit('illegal memory access')"), name="broken"), ONE_GPU)
    missing = check_part(replace(part("pass", gpus=2), name="missing"), ONE_GPU)
    return [check_part(replace(part("pass"), name="works"), ONE_GPU), broken, missing]


def test_the_report_reads_well_and_holds_all_of_it_as_json() -> None:
    text = write(MACHINE, results(), {"works": "passed before on NVIDIA A100, 2026-10-01"})
    assert "2 of 3 parts had never been run on a GPU; 1 of these ran now." in text
    assert "links: NV18 between 1 pair" in text
    assert f"missing: left out (needs 2 GPUs, and there are 1)\n    It works.\n    {NEVER}\n" in text
    assert "==== broken: the end of its output ====" in text
    assert "illegal memory access" in text
    found = read(text)
    assert found["gpus"] == ["NVIDIA H100"]
    assert [one["outcome"] for one in found["results"]] == ["passed", "failed", "left out"]
    with pytest.raises(ValueError, match="not a report"):
        read("something else")


def test_what_passed_in_an_earlier_report_is_no_longer_new_and_what_failed_is(tmp_path: Path) -> None:
    assert passed_before(tmp_path) == {}
    (tmp_path / "gpu-check-h100.txt").write_text(write(MACHINE, results(), {}))
    assert passed_before(tmp_path) == {"works": "passed before on NVIDIA H100, 2026-11-23"}


# ---- the parts ----


def test_each_part_has_a_name_of_its_own_and_names_what_exists() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    for one in PARTS:
        for argument in one.command:
            if argument.startswith(("tests/", "configs/")):
                assert (ROOT / argument).exists(), argument
    assert passed_before(EARLIER).keys() <= {one.name for one in PARTS}


@pytest.mark.parametrize(
    "campaign", [one for one in PARTS if "flows.cli.main" in one.command], ids=lambda one: one.name
)
def test_the_campaigns_configs_are_valid_and_train_on_a_gpu(campaign: Part) -> None:
    at = campaign.command.index("--set")
    config = load_config(ROOT / campaign.command[3], list(campaign.command[at + 1 :]))
    assert config.training.device == "cuda"


def test_every_test_file_for_gpus_is_part_of_the_check() -> None:
    named = {argument for one in PARTS for argument in one.command}
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py")} <= named


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_sentence_and_ends_with_2(tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert ran.stderr == ("gpu-check: torch sees no GPU, so there is nothing to check; millrace doctor says why.\n")
    assert not out.exists()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="only without a GPU's driver")
def test_without_a_gpu_make_installs_nothing_and_ends_with_2() -> None:
    ran = subprocess.run(["make", "gpu-check"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[0] == (
        "gpu-check: this machine has no GPU that nvidia-smi sees, so there is nothing to check."
    )
    assert not (ROOT / ".venv-gpu").exists()
