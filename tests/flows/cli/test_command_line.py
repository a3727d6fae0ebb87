"""Values on the command line, and the command line that continues a run."""

import argparse
import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.stored_run.run import Shape, make_run

from flows.cli.command_line import run_again
from flows.cli.main import build_parser, main
from storage.stores.factory import open_store


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--keep-age", "7d"], 7 * 86400.0),
        (["--keep-age", "1.5h"], 5400.0),
        (["--keep-age", "2 w"], 14 * 86400.0),
        (["--max-bytes", "10GB"], 10**10),
        (["--max-bytes", "1.5KiB"], 1536),
        (["--keep-versions", "3"], 3),
        (["--keep-checkpoints", "1"], 1),
    ],
)
def test_quantities_are_a_number_and_a_unit(words: list[str], expected: float) -> None:
    arguments = build_parser().parse_args(["gc", "run", *words])
    assert getattr(arguments, words[0][2:].replace("-", "_")) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gc", "run", "--keep-age", "7"], "'7'; expected a number and one of s, m, h, d, w, such as 7d"),
        (["gc", "run", "--keep-age", "-1d"], "expected one argument"),
        (["gc", "run", "--max-bytes", "10gb"], "'10gb'; expected a number and one of B, kB, MB"),
        (["gc", "run", "--keep-versions", "0"], "'0'; expected a whole number of at least 1"),
        (["inspect", "run", "--rows", "many"], "'many'; expected a whole number"),
        (["profile", "x.yaml", "--steps", "0"], "'0'; expected a whole number of at least 1"),
        (["profile", "x.yaml"], "--steps"),
        (["plan", "x.yaml", "--gpus", "many"], "'many'; expected a whole number"),
        (["plan", "x.yaml", "--price", "-1"], "'-1'; expected a finite number above 0"),
        (["plan", "x.yaml", "--lengths", "1,2"], "'1,2'; expected mean and"),
        (["plan", "x.yaml", "--lengths", "a,b,c"], "'a,b,c'; expected mean and"),
        (["plan", "x.yaml", "--goal", "x"], "--goal"),
    ],
)
def test_a_mistake_in_the_command_line_ends_with_2_and_a_sentence(
    words: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def run_arguments(root: str | None = None) -> argparse.Namespace:
    overrides = ["training.max_steps=600", 'prompts.files=["a b.jsonl"]']
    return argparse.Namespace(config=Path("my configs/mine.yaml"), set=overrides, root=root)


def test_a_shell_reads_config_settings_and_root_of_the_printed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elsewhere/millrace", "run"])
    assert shlex.split(run_again(run_arguments(root="s3://bucket/runs"), "mine-1")) == [
        *("elsewhere/millrace", "run", "my configs/mine.yaml"),
        *("--set", "training.max_steps=600", 'prompts.files=["a b.jsonl"]'),
        *("--root", "s3://bucket/runs", "--run-id", "mine-1"),
    ]
    assert "--root" not in run_again(run_arguments(), "mine-1")


def test_a_module_that_was_run_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flows/cli/main.py"])
    program = shlex.split(run_again(run_arguments(), "mine-1"))[:3]
    assert program == [sys.executable, "-m", "flows.cli.main"]
    ended = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"millrace {importlib.metadata.version('millrace')}\n"


def test_a_stored_run_is_profiled_from_its_promoted_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(open_store(str(tmp_path / "mine")), "mine", Shape(steps=1))
    stored = [str(tmp_path / "mine"), "--steps", "1", "--root", str(tmp_path)]
    # A setting replaces the run's own model.
    for settings, named in (([], "promoted"), (["--set", "model.path=/none"], "/none")):
        assert main(["profile", *stored, *settings]) == 2
        assert named in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
