"""`millrace mirror --tensorboard`, with the real package: what event files hold, and what TensorBoard shows of it."""

import argparse
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.pages.mirrored import DEADLINE, Trained, copy, events, start_mirror, until
from support.stores.dict_store import DictStore
from tensorboardX.proto.event_pb2 import SessionLog

from dashboard.integrations.sinks import mirror
from dashboard.integrations.sinks.copying import Mirror
from dashboard.integrations.sinks.tensorboard import TensorBoard
from millrace.errors import InputError, RunMissing
from millrace.runs.record import end_attempt
from storage import layout
from storage.stores.factory import open_store

Shown = dict[tuple[str, int], float]
"""Value by name and step."""


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(open_store(str(tmp_path / "runs" / "mine")))


def _expected(*versions: int, reward: float | None = None) -> Shown:
    return {
        key: value
        for version in versions
        for key, value in {
            ("train/reward_mean", version): version / 8 if reward is None else reward,
            ("train/loss", version): -1.0,
        }.items()
    }


def _shown(folder: Path) -> Shown:
    """What TensorBoard shows: where a log says that it starts at a step, what came before it from there on is gone."""
    shown: Shown = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            shown = {(tag, step): value for (tag, step), value in shown.items() if step < event.step}
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "text":
                continue
            assert (value.tag, event.step) not in shown, f"{value.tag} at {event.step} is shown twice"
            shown[value.tag, event.step] = value.simple_value
    return shown


def _times_written(folder: Path) -> Counter[tuple[str, int]]:
    return Counter((value.tag, event.step) for event in events(folder) for value in event.summary.value)


def test_each_measurement_and_evaluation_is_a_point_at_its_policy_version_and_time(
    trained: Trained, tmp_path: Path
) -> None:
    trained.evaluate(0, 0.25)
    trained.step(1, 2, 3)
    trained.evaluate(3, 0.75, t=200.0)
    assert copy(trained.store, tmp_path / "mine") == 5
    accuracies = {("evaluation/accuracy", 0): 0.25, ("evaluation/accuracy", 3): 0.75}
    assert _shown(tmp_path / "mine") == _expected(1, 2, 3) | accuracies
    times = {(v.tag, event.step): event.wall_time for event in events(tmp_path / "mine") for v in event.summary.value}
    assert times["train/loss", 2] == 102.0
    assert times["evaluation/accuracy", 3] == 200.0


def test_a_mirror_that_is_started_again_writes_only_what_is_new(trained: Trained, tmp_path: Path) -> None:
    trained.evaluate(0, 0.25)
    trained.step(1, 2)
    assert [copy(trained.store, tmp_path / "mine") for _ in range(2)] == [3, 0]
    trained.step(3)
    trained.evaluate(0, 0.5, t=60.0)
    assert copy(trained.store, tmp_path / "mine") == 2
    times = _times_written(tmp_path / "mine")
    assert {key for key, count in times.items() if count > 1} == {("evaluation/accuracy", 0)}
    assert times.keys() >= _expected(1, 2, 3).keys()


@pytest.mark.parametrize("goes", ["in one go", "with a start in between"])
def test_versions_that_a_restarted_trainer_made_again_replace_those_before(
    trained: Trained, tmp_path: Path, goes: str
) -> None:
    trained.step(1, 2, 3, 4)
    trained.evaluate(2, 0.5)
    trained.evaluate(4, 0.75)
    if goes == "with a start in between":
        copy(trained.store, tmp_path / "mine")
    trained.step(3, incarnation=1, reward=9.0)
    copy(trained.store, tmp_path / "mine")
    accuracies = {("evaluation/accuracy", 2): 0.5, ("evaluation/accuracy", 4): 0.75}
    assert _shown(tmp_path / "mine") == _expected(1, 2) | _expected(3, reward=9.0) | accuracies
    # The witness: what was rolled back had been written.
    assert _times_written(tmp_path / "mine")["train/loss", 3] == 2


class _KilledError(Exception):
    pass


class _DiesOnceWritten(TensorBoard):
    """Its points are on the disk, and nobody remembers."""

    def flush(self) -> None:
        super().flush()
        raise _KilledError


def test_after_a_mirror_was_killed_before_it_remembered_each_point_is_shown_once(
    trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    trained.step(1, 2)
    copy(trained.store, folder)
    trained.step(3, 4)
    with pytest.raises(_KilledError):
        Mirror(trained.store, _DiesOnceWritten(folder)).copy()
    trained.step(5)
    copy(trained.store, folder)
    assert _shown(folder) == _expected(1, 2, 3, 4, 5)
    # The witness: it did write them twice.
    assert _times_written(folder)["train/loss", 4] == 2


def test_a_damaged_part_is_named_and_left_out_and_the_rest_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DictStore()
    run = Trained(store)
    run.step(1, 2, 3)
    path = f"{layout.metrics('train', 0)}/log/000000000002.json"
    file = f"{layout.metrics('train', 0)}/{json.loads(store.objects[path])['file']}"
    store.objects[file] = bytes(len(store.objects[file]))
    copy(store, tmp_path / "mine")
    assert _shown(tmp_path / "mine") == _expected(1, 3)
    assert f"millrace: left out: {file}" in capsys.readouterr().err


def test_points_of_two_runs_with_one_name_are_never_mixed(tmp_path: Path) -> None:
    first, second = Trained(DictStore()), Trained(DictStore())
    first.step(1)
    second.step(1, 2)
    copy(first.store, tmp_path / "mine")
    with pytest.raises(InputError):
        copy(second.store, tmp_path / "mine")
    assert _shown(tmp_path / "mine") == _expected(1)


def test_a_folder_that_cant_be_used_gives_one_sentence(trained: Trained, tmp_path: Path) -> None:
    trained.step(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        copy(trained.store, tmp_path / "file" / "mine")
    with pytest.raises(InputError):
        copy(trained.store, Path("/proc/mine"))


def _arguments(*command: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    mirror.add_parser(parser.add_subparsers())
    return parser.parse_args(["mirror", *map(str, command)])


def test_a_command_that_names_no_place_or_no_run_is_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        mirror.run(_arguments(trained.store.url))
    with pytest.raises(RunMissing):
        mirror.run(_arguments(tmp_path / "nothing", "--tensorboard", tmp_path))


@pytest.mark.slow
def test_following_copies_what_is_added_until_the_run_has_ended(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard" / "mine"
    trained.step(1)
    codes: list[int] = []
    arguments = _arguments(trained.store.url, "--tensorboard", folder.parent, "--follow")
    following = threading.Thread(target=lambda: codes.append(mirror.run(arguments)), daemon=True)
    following.start()
    for version in (2, 3):
        # Only what it has copied before shows that it went on.
        until(lambda done=version - 1: _shown(folder) == _expected(*range(1, done + 1)))
        trained.step(version)
    trained.evaluate(3, 0.5)
    end_attempt(trained.store, 0, "finished")
    following.join(DEADLINE)
    assert codes == [0]
    assert _shown(folder) == _expected(1, 2, 3) | {("evaluation/accuracy", 3): 0.5}


@pytest.mark.slow
def test_ctrl_c_ends_following_with_everything_copied_so_far(trained: Trained, tmp_path: Path) -> None:
    trained.step(1)
    process = start_mirror(trained, "--tensorboard", "logs", "--follow", cwd=tmp_path)
    until(lambda: _shown(tmp_path / "logs" / "mine") == _expected(1))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, "")
    assert out == f"mine: 1 new points ─► TensorBoard, {Path('logs/mine')}\n"


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(
    trained: Trained, tmp_path: Path, option: str, package: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError({package!r})")
    process = start_mirror(
        trained,
        f"--{option}",
        "x",
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]),
    )
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert f"--{option} needs the package {package}" in err
    assert f"'.[{option}]'" in err
