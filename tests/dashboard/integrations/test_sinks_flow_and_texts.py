"""What TensorBoard gets beside metrics: idle shares and rates by replica, the configs, and samples of responses."""

from pathlib import Path

import numpy as np
import pytest
from support.pages.mirrored import CONFIG, Trained, copy, events
from support.stored_run.run import Shape, make_run

from dashboard.read.run_reader import RunReader
from millrace.runs.record import end_attempt, resume_run
from storage.stores.factory import open_store


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(open_store(str(tmp_path / "runs" / "mine")))


def _flow(folder: Path) -> list[tuple[str, int, float]]:
    values = [(value.tag, event.step, value.simple_value) for event in events(folder) for value in event.summary.value]
    return [one for one in values if one[0].startswith("flow/")]


def _texts(folder: Path, name: str) -> dict[int, str]:
    """Markdown by step; fails if one is written twice."""
    found: dict[int, str] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.tag == name:
                assert value.metadata.plugin_data.plugin_name == "text"
                assert event.step not in found
                (markdown,) = value.tensor.string_val
                found[event.step] = markdown.decode()
    return found


def test_a_generators_idle_share_and_rate_are_summed_over_each_policy_version(trained: Trained, tmp_path: Path) -> None:
    trained.step(1, 2, 3)
    trained.work(0, 101.0, 1, busy=1.5, waited=0.5, tokens=100.0)
    trained.work(0, 103.0, 1, busy=0.5, waited=1.5, tokens=300.0)
    trained.work(0, 105.0, 3, busy=2.0, waited=0.0, tokens=900.0)
    trained.work(1, 101.0, 2, busy=1.0, waited=3.0, tokens=40.0)
    copy(trained.store, tmp_path / "mine")
    # Version 3 of the first and version 2 of the second may go on.
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
