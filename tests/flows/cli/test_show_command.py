"""Output and exit codes of `millrace show` and `millrace diff`."""

import json
from pathlib import Path

import pytest
from support.campaigns.command import run_command
from support.replay.scripted_run import ScriptedRun

from flows.cli.show import DIFFERENT
from storage import layout
from storage.stores.factory import open_store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """`plain`, and `other`, which differs from it from step 3 on."""
    for name, changed in (("plain", {}), ("other", {"tokens": 3})):
        ScriptedRun(open_store(str(tmp_path / name)), changed=changed).steps(1, 4).close()
    return tmp_path


def test_show_prints_batch_and_numbers(runs: Path) -> None:
    code, text = run_command("show", str(runs / "plain"), "--step", "3")
    assert code == 0
    for part in ("version 2 became 3", "3 groups, 6 trajectories", "7+1=", "grad_norm"):
        assert part in text, f"{part!r} is not in\n{text}"


def test_show_prints_the_best_and_the_worst_response_of_a_group(runs: Path) -> None:
    _, text = run_command("show", str(runs / "plain"), "--step", "2")
    _, as_json = run_command("show", str(runs / "plain"), "--step", "2", "--json")
    group = json.loads(as_json)["groups"][0]
    lines = [line.split() for line in text[text.index("best and worst response") :].splitlines()]
    shown = [line for line in lines if line[:1] == [str(group["group_id"])]]
    worst, best = group["responses"]
    assert shown == [[str(group["group_id"]), *best.split(), "1.00"], [str(group["group_id"]), *worst.split(), "0.00"]]


def test_show_names_the_source_of_each_group_if_there_are_several(runs: Path) -> None:
    store = open_store(str(runs / "mixed"))
    ScriptedRun(store, source_of=lambda group_id: "calculator" if group_id % 2 else "sums").steps(1, 2).close()

    def batch(name: str) -> list[list[str]]:
        """The first words of its lines: header, rule, groups."""
        _, text = run_command("show", str(runs / name), "--step", "2", width=80)
        return [line.split()[:3] for line in text[text.index("\nbatch") :].splitlines()[3:7]]

    header, _, *groups = batch("mixed")
    assert header == ["group", "source", "prompt"]
    assert groups == [["3", "calculator", "3+1="], ["4", "sums", "4+1="]]
    assert "source" not in batch("plain")[0]
    _, text = run_command("show", str(runs / "mixed"), "--step", "2", "--json")
    assert [group["source"] for group in json.loads(text)["groups"]] == ["calculator", "sums", "calculator"]


def test_control_characters_of_a_run_do_not_reach_the_output(runs: Path) -> None:
    store = open_store(str(runs / "plain"))
    record = json.loads(bytes(store.get(layout.RUN)))
    record["config"]["training"]["loss"] = "\x1b[31m[bold]red"
    store.put(layout.RUN, json.dumps(record).encode())
    _, text = run_command("diff", str(runs / "plain"), str(runs / "other"))
    assert "\x1b" not in text
    assert "[bold]red" in text


def test_diff_names_the_first_difference_and_ends_with_1(runs: Path) -> None:
    code, text = run_command("diff", str(runs / "plain"), str(runs / "other"))
    assert code == DIFFERENT
    assert "group 7, member 1, token 0" in text
    assert run_command("diff", str(runs / "plain"), str(runs / "plain"))[0] == 0


def test_both_print_everything_as_json(runs: Path) -> None:
    _, text = run_command("show", str(runs / "plain"), "--step", "2", "--json")
    group = json.loads(text)["groups"][0]
    assert group["rewards"] == [0.0, 1.0]
    assert len(group["responses"]) == 2
    code, text = run_command("diff", str(runs / "plain"), str(runs / "other"), "--json")
    assert (code, json.loads(text)["batch"]["step"]) == (DIFFERENT, 3)
