"""Values on the command line, and the command line that continues a run."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.stored_run.run import Shape, make_run

from flows.cli.command_line import as_typed, command_to_resume
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


def test_the_printed_command_is_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["sft", "my configs/mine.yaml", "--set", 'prompts.files=["a b.jsonl"]', "--run-id", "mine-1", "--resume"]
    monkeypatch.setattr(sys, "argv", ["elsewhere/millrace", *typed])
    assert shlex.split(as_typed(typed)) == ["elsewhere/millrace", *typed]


def test_a_program_found_by_path_is_printed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "millrace"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(program), "run"])
    assert as_typed(["run"]) == "millrace run"


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        (["run", "a.yaml"], ["--run-id", "mine-1", "--resume"]),
        (["sft", "a.yaml", "--from", "runs/x", "--run-id", "mine-1"], ["--resume"]),
        (["run", "a.yaml", "--run-id", "mine-1", "--resume"], []),
        (["run", "a.yaml", "--run-id", "mine-1", "--resume", "latest"], []),
    ],
)
def test_a_run_is_continued_by_what_was_typed_and_what_is_missing(typed: list[str], added: list[str]) -> None:
    arguments = build_parser().parse_args(typed, argparse.Namespace(words=typed))
    continued = shlex.split(command_to_resume(arguments, "mine-1"))
    assert continued[continued.index(typed[0]) :] == [*typed, *added]


def test_a_module_that_was_run_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flows/cli/main.py"])
    assert shlex.split(as_typed(["run"])) == [sys.executable, "-m", "flows.cli.main", "run"]


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
