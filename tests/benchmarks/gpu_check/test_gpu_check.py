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

from benchmarks.gpu_check.checking import Equipment, Result, check, check_part
from benchmarks.gpu_check.parts import COUNTS, FIGURES, OUT, PARTS, Part
from benchmarks.gpu_check.report import EARLIER, NEVER, passed_before, read, write
from configs.load import load_config

ONE_GPU = Equipment(gpus=1, installed=lambda name: None)
ROOT = Path(__file__).parents[3]
MACHINE: dict[str, Any] = {
    "time": "2026-11-23T12:00:00+00:00",
    "commit": "abc",
    "gpus": ["NVIDIA H100"],
    "doctor": {"lines": [{"group": "GPUs", "what": "links", "value": "NV18 between 1 pair"}]},
}


def part(program: str, **needs: Any) -> Part:
    return Part(name="a part", shows="It works.", command=("-c", program), **needs)


def test_a_part_that_ends_with_0_passed_and_its_figures_are_kept() -> None:
    program = f"open('{OUT}/{FIGURES}', 'w').write('{{\"rate\": 3}}'); print('done')"
    result = check_part(part(program), ONE_GPU)
    assert (result.outcome, result.figures, result.output) == ("passed", {"rate": 3}, "done")
    assert result.command.startswith("python -c ")


def test_a_part_that_fails_keeps_the_end_of_its_output_and_stops_no_other() -> None:
    failing = replace(part("print('a line\\n' * 500); raise SystemExit('no kernel image')"), name="first")
    first, second = check([failing, replace(part("pass"), name="second")], ONE_GPU, lambda line: None)
    assert (first.outcome, second.outcome) == ("failed", "passed")
    assert first.output.endswith("no kernel image")
    assert len(first.output.splitlines()) == 60


def test_a_part_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(1); pathlib.Path({str(file)!r}).touch()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    result = check_part(part(program, minutes=0.3 / 60), ONE_GPU)
    assert result.outcome == "too slow"
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)
    assert not file.exists()


@pytest.mark.parametrize("needs", [{"gpus": 2}, {"package": "vllm"}])
def test_a_part_is_left_out_where_something_is_missing(needs: dict[str, Any]) -> None:
    assert check_part(part("raise SystemExit(1)", **needs), ONE_GPU).outcome == "left out"


@pytest.mark.parametrize(("skipped", "outcome"), [(1, "passed"), (2, "left out")])
def test_tests_are_counted_and_none_that_ran_is_no_success(skipped: int, outcome: str) -> None:
    report = f'<testsuites><testsuite tests="2" skipped="{skipped}" failures="0" errors="0"/></testsuites>'
    result = check_part(part(f"open('{OUT}/{COUNTS}', 'w').write('''{report}''')"), ONE_GPU)
    assert result.outcome == outcome


# ---- the report ----


def results() -> Sequence[Result]:
    broken = check_part(replace(part("raise SystemExit('illegal memory access')"), name="broken"), ONE_GPU)
    missing = check_part(replace(part("pass", gpus=2), name="missing"), ONE_GPU)
    return [check_part(replace(part("pass"), name="works"), ONE_GPU), broken, missing]


def test_the_report_says_what_is_new_and_holds_all_of_it_as_json() -> None:
    text = write(MACHINE, results(), {"works": "passed before on NVIDIA A100, 2026-10-01"})
    assert "illegal memory access" in text
    output = read(text)
    assert output["gpus"] == ["NVIDIA H100"]
    assert [result["outcome"] for result in output["results"]] == ["passed", "failed", "left out"]
    assert [result["before"] == NEVER for result in output["results"]] == [False, True, True]
    with pytest.raises(ValueError, match="not a report"):
        read("something else")


def test_what_passed_in_an_earlier_report_is_no_longer_new_and_what_failed_is(tmp_path: Path) -> None:
    assert passed_before(tmp_path) == {}
    (tmp_path / "gpu-check-h100.txt").write_text(write(MACHINE, results(), {}))
    assert passed_before(tmp_path) == {"works": "passed before on NVIDIA H100, 2026-11-23"}


# ---- the parts ----


def test_parts_have_unique_names_and_cover_every_test_of_gpus() -> None:
    named = {argument for each in PARTS for argument in each.command}
    assert len({each.name for each in PARTS}) == len(PARTS)
    for argument in named:
        if argument.startswith(("tests/", "configs/")):
            assert (ROOT / argument).exists(), argument
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py")} <= named
    assert passed_before(EARLIER).keys() <= {each.name for each in PARTS}


def test_the_campaigns_configs_are_valid_and_train_on_a_gpu() -> None:
    for campaign in (each for each in PARTS if "flows.cli.main" in each.command):
        at = campaign.command.index("--set")
        config = load_config(ROOT / campaign.command[3], list(campaign.command[at + 1 :]))
        assert config.training.device == "cuda", campaign.name


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_without_a_gpu_it_says_so_in_one_sentence_and_ends_with_2(tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stderr.count("\n"), out.exists()) == (2, 1, False)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="only without a GPU's driver")
def test_without_a_gpu_make_installs_nothing_and_ends_with_2() -> None:
    assert subprocess.run(["make", "gpu-check"], capture_output=True, cwd=ROOT).returncode == 2
    assert not (ROOT / ".venv-gpu").exists()
