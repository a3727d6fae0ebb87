"""The command that a person pastes to continue a run, and the version that the command says it has."""

import argparse
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.invocation import run_again


def asked(root: str | None = None) -> argparse.Namespace:
    overrides = ["training.max_steps=600", 'prompts.files=["a b.jsonl"]']
    return argparse.Namespace(config=Path("my configs/mine.yaml"), set=overrides, root=root)


def test_the_command_keeps_config_settings_and_root_and_a_shell_reads_it_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["elsewhere/millrace", "run"])
    assert shlex.split(run_again(asked(root="s3://bucket/runs"), "mine-1")) == [
        *("elsewhere/millrace", "run", "my configs/mine.yaml"),
        *("--set", "training.max_steps=600", 'prompts.files=["a b.jsonl"]'),
        *("--root", "s3://bucket/runs", "--run-id", "mine-1"),
    ]
    assert "--root" not in run_again(asked(), "mine-1")


def test_a_command_on_the_path_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "millrace").write_text("#!/bin/sh\n")
    (tmp_path / "millrace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "millrace")])
    assert run_again(asked(), "mine-1").startswith("millrace run ")


def test_a_module_that_was_run_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flows/cli/main.py"])
    program = shlex.split(run_again(asked(), "mine-1"))[:3]
    assert program == [sys.executable, "-m", "flows.cli.main"]
    ended = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"millrace {importlib.metadata.version('millrace')}\n"
