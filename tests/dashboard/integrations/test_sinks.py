"""`millrace mirror --tensorboard`, with the real package: what event files hold, and what TensorBoard shows of it."""

import argparse
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.pages.mirrored import CONFIG, DEADLINE, Trained, copy, events, start_mirror, wait_until
from support.stored_run.run import Shape, make_run
from support.stores.dict_store import DictStore
from support.streams.rows import part_files
from tensorboardX.proto.event_pb2 import SessionLog

from dashboard.integrations.sinks import mirror
from dashboard.integrations.sinks.copying import Mirror
from dashboard.integrations.sinks.tensorboard import TensorBoard
from dashboard.read.run_reader import RunReader
from millrace.errors import InputError, RunMissing
from millrace.runs.record import end_attempt, resume_run
from storage import layout
from storage.stores.factory import open_store

Shown = dict[tuple[str, int], float]
"""Value by name and step."""


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(open_store(str(tmp_path / "runs" / "mine")))


def _expected(*versions: int, reward: float | None = None) -> Shown:
    rewards = {("train/reward_mean", version): version / 8 if reward is None else reward for version in versions}
    return rewards | {("train/loss", version): -1.0 for version in versions}


def _shown(folder: Path) -> Shown:
    """The points that TensorBoard shows: where a log starts at a step, earlier points from there on are gone."""
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


def test_figures_of_sources_and_evaluation_sets_are_points_under_their_names(tmp_path: Path) -> None:
    store = DictStore()
    run = make_run(store, "mine", Shape(steps=3, sources=("math", "words")))
    copy(store, tmp_path / "mine")
    shown = _shown(tmp_path / "mine")
    assert [shown["evaluation/accuracy" + name, run.policy_version] for name in ("", "/math", "/words")] == [0.75] * 3
    assert {tag for tag, _ in shown} >= {"train/reward_mean", "train/reward_mean/math", "train/reward_mean/words"}


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


def test_versions_that_a_restarted_trainer_made_again_replace_those_before(trained: Trained, tmp_path: Path) -> None:
    trained.step(1, 2, 3, 4)
    trained.evaluate(2, 0.5)
    trained.evaluate(4, 0.75)
    copy(trained.store, tmp_path / "mine")
    trained.step(3, incarnation=1, reward=9.0)
    copy(trained.store, tmp_path / "mine")
    accuracies = {("evaluation/accuracy", 2): 0.5, ("evaluation/accuracy", 4): 0.75}
    assert _shown(tmp_path / "mine") == _expected(1, 2) | _expected(3, reward=9.0) | accuracies
    # The witness: the lost version had been written.
    assert _times_written(tmp_path / "mine")["train/loss", 3] == 2


class _KilledError(Exception):
    pass


class _DiesOnceWritten(TensorBoard):
    """Dies when its points are on the disk, before it has noted that."""

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
        Mirror(trained.store, _DiesOnceWritten(str(tmp_path), "mine")).copy()
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
    file = part_files(store, layout.metrics("train", 0))[1]
    store.objects[file] = bytes(len(store.objects[file]))
    copy(store, tmp_path / "mine")
    assert _shown(tmp_path / "mine") == _expected(1, 3)
    assert f"millrace: skipped: {file}" in capsys.readouterr().err


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
        # Each copied step shows that it still follows.
        wait_until(lambda done=version - 1: _shown(folder) == _expected(*range(1, done + 1)))
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
    wait_until(lambda: _shown(tmp_path / "logs" / "mine") == _expected(1))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, "")
    assert out == f"mine: 1 new points ─► TensorBoard, {Path('logs/mine')}\n"


@pytest.mark.parametrize(
    ("option", "package"),
    [
        ("tensorboard", "tensorboardX"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
        ("otlp", "opentelemetry"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(
    trained: Trained, tmp_path: Path, option: str, package: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError({package!r})")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    process = start_mirror(trained, f"--{option}", "x", cwd=tmp_path, PYTHONPATH=path)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert f"--{option} needs the package {package}" in err
    assert f"'.[{option}]'" in err


def _flow(folder: Path) -> list[tuple[str, int, float]]:
    values = [(value.tag, event.step, value.simple_value) for event in events(folder) for value in event.summary.value]
    return [value for value in values if value[0].startswith("flow/")]


def _texts(folder: Path, name: str) -> dict[int, str]:
    """Markdown by step; fails if one is written twice."""
    texts: dict[int, str] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.tag == name:
                assert value.metadata.plugin_data.plugin_name == "text"
                assert event.step not in texts
                (markdown,) = value.tensor.string_val
                texts[event.step] = markdown.decode()
    return texts


def test_a_generators_idle_share_and_rate_are_summed_over_each_policy_version(trained: Trained, tmp_path: Path) -> None:
    trained.step(1, 2, 3)
    trained.work(0, 101.0, 1, busy=1.5, waited=0.5, tokens=100.0)
    trained.work(0, 103.0, 1, busy=0.5, waited=1.5, tokens=300.0)
    trained.work(0, 105.0, 3, busy=2.0, waited=0.0, tokens=900.0)
    trained.work(1, 101.0, 2, busy=1.0, waited=3.0, tokens=40.0)
    copy(trained.store, tmp_path / "mine")
    # Version 3 of the first and version 2 of the second may not be over.
    first = [("flow/generate-0/idle_share", 1, 0.5), ("flow/generate-0/tokens_per_second", 1, 75.0)]
    assert _flow(tmp_path / "mine") == first
    trained.step(4)
    trained.work(0, 106.0, 3, busy=1.0, waited=1.0, tokens=1100.0)
    trained.work(0, 108.0, 4, busy=1.0, waited=1.0, tokens=1200.0)
    copy(trained.store, tmp_path / "mine")
    second = [("flow/generate-0/idle_share", 3, 0.25), ("flow/generate-0/tokens_per_second", 3, 200.0)]
    assert _flow(tmp_path / "mine") == first + second


def test_the_config_of_each_attempt_is_a_text_at_the_version_it_went_on_from(trained: Trained, tmp_path: Path) -> None:
    trained.step(1)
    copy(trained.store, tmp_path / "mine")
    end_attempt(trained.store, 0, "stopped")
    resume_run(trained.store, {**CONFIG, "training": {"max_steps": 12}})
    trained.step(2)
    for _ in range(2):
        copy(trained.store, tmp_path / "mine")
    configs = [event for event in events(tmp_path / "mine") for value in event.summary.value if value.tag == "config"]
    shown = [event.summary.value[0].tensor.string_val[0].decode() for event in configs]
    assert [event.step for event in configs] == [0, 0]
    assert ['"max_steps": 10' in shown[0], '"max_steps": 12' in shown[1]] == [True, True]
    assert all(line.startswith("    ") for text in shown for line in text.splitlines())


@pytest.mark.slow
def test_the_best_and_the_worst_response_of_every_twentieth_step_are_a_text(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "mine"))
    make_run(store, "mine", Shape(steps=41, groups_per_step=2, group_size=4, generators=1))
    for _ in range(2):
        copy(store, tmp_path / "logs")
    samples = _texts(tmp_path / "logs", "samples")
    assert samples.keys() == {1, 20, 40}
    run = RunReader(store).look()
    for version, text in samples.items():
        rewards = run.consumed["reward"][(run.consumed["policy_version"] == version) & run.trained]
        assert f"**Best: reward {np.nanmax(rewards):.3g}**" in text
        assert f"**Worst: reward {np.nanmin(rewards):.3g}**" in text
        assert text.count("→") == 2
