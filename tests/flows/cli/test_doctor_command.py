"""Output and exit codes of `millrace doctor`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.campaigns.command import run_command
from support.doctor.scripted_machine import scripted_machine, with_two_gpus

from flows.cli.before_run import NOT_READY
from millrace.doctor import machine
from millrace.doctor.machine import Machine


@pytest.mark.parametrize(
    ("scripted", "code", "line"),
    [
        (scripted_machine(), 0, "Campaigns can run on this machine's CPUs. Try one: make demo"),
        (scripted_machine(has_seccomp=False), NOT_READY, "No campaign can run here yet: isolation of rewards."),
        # A machine whose GPUs can't be used still runs campaigns on its CPUs.
        (with_two_gpus(torch_devices=None, packages={"torch": "2.13.0+cpu", "prefect": "3.7.7"}), 0, "! torch"),
    ],
)
def test_only_problems_that_stop_campaigns_end_with_1(
    scripted: Machine, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Machine", lambda root: scripted)
    ended, text = run_command("doctor", "--root", str(tmp_path), width=140)
    assert ended == code
    assert line in text.replace("!  torch", "! torch")
    red_lines = [row for row in text.splitlines() if "✗" in row]
    assert ["Install the package libseccomp2." in row for row in red_lines] == [True] * code


def test_the_command_imports_neither_torch_nor_prefect(tmp_path: Path) -> None:
    code = (
        "import sys; from flows.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'prefect', 'transformers', 'vllm'} & sys.modules.keys(); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", "--root", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PATH": "", "PREFECT_API_URL": ""},
    )
    diagnosis = json.loads(ended.stdout)
    assert ended.returncode == (0 if diagnosis["ready"] else 1), ended.stderr
    assert {line["group"] for line in diagnosis["lines"]} == {"host", "packages", "storage", "network", "GPUs"}
    assert not (tmp_path / "runs").exists()
