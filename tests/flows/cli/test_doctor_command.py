"""What `millrace doctor` prints, and how it ends."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from support.doctor.scripted_machine import scripted_machine, with_two_gpus

from flows.cli.doctor import NOT_READY, add_parser, run
from millrace.doctor.machine import Machine


def printed(machine: Machine, *arguments: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    out = io.StringIO()
    code = run(parser.parse_args(["doctor", *arguments]), Console(file=out, width=140), machine)
    return code, out.getvalue()


def test_a_machine_that_can_run_campaigns_ends_with_0_and_says_what_to_try(tmp_path: Path) -> None:
    code, text = printed(scripted_machine(), "--root", str(tmp_path))
    assert code == 0
    assert "✗" not in text
    assert text.rstrip().endswith("Campaigns can run on this machine's CPUs. Try one: make demo")


def test_each_red_line_says_what_to_do(tmp_path: Path) -> None:
    code, text = printed(scripted_machine(has_seccomp=False), "--root", str(tmp_path))
    assert code == NOT_READY == 1
    [red] = [row for row in text.splitlines() if "✗" in row]
    assert "Install the package libseccomp2." in red
    assert "No campaign can run here yet: isolation of rewards." in text


def test_what_only_gpus_lack_does_not_end_with_1(tmp_path: Path) -> None:
    machine = with_two_gpus("SYS", torch_devices=None, packages={"torch": "2.13.0+cpu", "prefect": "3.7.7"})
    code, text = printed(machine, "--root", str(tmp_path))
    assert code == 0
    assert any(row.lstrip().startswith("! torch") or " !  torch" in row for row in text.splitlines()), text


def test_the_command_answers_for_this_machine_without_importing_torch_or_prefect(tmp_path: Path) -> None:
    code = (
        "import sys; from flows.cli.main import main; found = main(sys.argv[1:]); "
        "heavy = {'torch', 'prefect', 'transformers', 'vllm'} & sys.modules.keys(); "
        "sys.exit(f'imported {heavy}' if heavy else found)"
    )
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", "--root", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PATH": "", "PREFECT_API_URL": ""},
    )
    found = json.loads(ran.stdout)
    assert ran.returncode == (0 if found["ready"] else 1), ran.stderr
    assert {one["group"] for one in found["lines"]} == {"host", "packages", "storage", "network", "GPUs"}
    assert not (tmp_path / "runs").exists()
