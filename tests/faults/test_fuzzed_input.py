"""Configs and prompt files with random mistakes: a sentence, or a config that may run. Never a traceback, never half a
run.

The checks are those that `millrace run` makes before it starts anything. The seed is in the test's name and output.
"""

import random
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET
from support.damage.fuzz import config_text, near_text, overrides, prompt_file

from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import RunConfig
from flows.campaign.prepare import check
from millrace.errors import InputError
from storage.errors import StorageError
from tasks.jobs import jobs

SEEDS = (26,)
PRESETS = sorted(PRESET.parent.glob("*.yaml"))


def may_be_checked_here(config: RunConfig) -> bool:
    """Not what asks a server, or another process, about a model, an engine or a work pool."""
    return (
        config.model.path is None
        and config.generation.engine == "transformers"
        and all(job.work_pool is None for job in jobs(config))
    )


def refusal(config_file: Path, sets: list[str], root: Path) -> str | None:
    """What `millrace run` would say; None if it would start. Other errors would be its traceback."""
    try:
        config = load_config(config_file, [*sets, f"storage.root={root}"])
        if may_be_checked_here(config):
            check(config, "fuzzed", resume="never")
    except (ConfigError, InputError, StorageError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.faults)])
def test_a_config_with_random_mistakes_is_refused_in_sentences_or_could_run(
    count: int, seed: int, tmp_path: Path
) -> None:
    chooser = random.Random(seed)
    # With their defaults, so that each key has a value to start from.
    presets = [load_config(path, []).model_dump(mode="json") for path in PRESETS]
    refused = 0
    for number in range(count):
        text, sets = config_text(chooser, chooser.choice(presets)), overrides(chooser)
        if number % 8 == 0:
            text, sets = near_text(chooser, presets), []
        file = tmp_path / "config.yaml"
        file.write_bytes(text)
        # The last line that a test which fails has printed names what it failed at.
        print(f"seed {seed}, file {number}")
        said = refusal(file, sets, tmp_path / "runs")
        assert said is None or said.strip(), f"seed {seed}, config {number}: an empty sentence"
        refused += said is not None
        assert not any((tmp_path / "runs").glob("*")), f"seed {seed}, config {number}: something of a run is there"
    print(f"{count} configs of seed {seed}: {refused} refused in sentences, {count - refused} could run")
    assert refused > 0


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.faults)])
def test_a_prompt_file_with_random_mistakes_is_refused_or_could_be_asked(count: int, seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    refused = 0
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = prompt_file(chooser, folder)
        # The last line that a test which fails has printed names what it failed at.
        print(f"seed {seed}, file {number}")
        said = refusal(PRESET, [f"prompts.source={file}", "prompts.num_eval=2"], tmp_path / "runs")
        refused += said is not None
        assert said is None or ("Traceback" not in said and said.strip())
        assert not any((tmp_path / "runs").glob("*")), f"seed {seed}, prompts {number}: something of a run is there"
    print(f"{count} prompt files of seed {seed}: {refused} refused in a sentence, {count - refused} could be asked")
    assert 0 < refused < count
