"""What `millrace show` and `millrace diff` print, and how they end."""

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.replay.scripted_run import ScriptedRun

from flows.cli.show import DIFFERENT, add_parsers, run
from storage import layout
from storage.stores.factory import open_store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """`plain`, and `other`, which parts from it at step 3."""
    for name, changed in (("plain", {}), ("other", {"tokens": 3})):
        ScriptedRun(open_store(str(tmp_path / name)), changed=changed).steps(1, 4).close()
    return tmp_path


def printed(*command: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(dest="command"))
    out = io.StringIO()
    code = run(parser.parse_args(command), Console(file=out, width=120))
    return code, out.getvalue()


def test_show_prints_batch_numbers_and_config(runs: Path) -> None:
    code, text = printed("show", str(runs / "plain"), "--step", "3")
    assert code == 0
    for said in ("version 2 became 3", "3 groups, 6 trajectories", "7+1=", "grad_norm", "training.learning_rate"):
        assert said in text, f"{said!r} is not in\n{text}"


def test_what_a_run_holds_cannot_steer_the_terminal(runs: Path) -> None:
    store = open_store(str(runs / "plain"))
    record = json.loads(bytes(store.get(layout.RUN)))
    record["config"]["training"]["loss"] = "\x1b[31m[bold]red"
    store.put(layout.RUN, json.dumps(record).encode())
    _, text = printed("show", str(runs / "plain"), "--step", "1")
    assert "\x1b" not in text
    assert "[bold]red" in text
    _, text = printed("diff", str(runs / "plain"), str(runs / "other"))
    assert "\x1b" not in text
    assert "[bold]red" in text


def test_diff_of_runs_that_part_says_where_and_ends_with_1(runs: Path) -> None:
    code, text = printed("diff", str(runs / "plain"), str(runs / "other"))
    assert code == DIFFERENT
    assert "group 7, member 1, token 0" in text
    assert printed("diff", str(runs / "plain"), str(runs / "plain"))[0] == 0


def test_both_give_everything_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed("show", str(runs / "plain"), "--step", "2", "--json")
    assert json.loads(capsys.readouterr().out)["groups"][0]["rewards"] == [0.0, 1.0]
    code, _ = printed("diff", str(runs / "plain"), str(runs / "other"), "--json")
    assert (code, json.loads(capsys.readouterr().out)["batch"]["step"]) == (DIFFERENT, 3)
