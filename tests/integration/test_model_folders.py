"""Model folders with something wrong in them: a sentence before anything starts, or the run that the sound one gives.

Each cell is one change of a sound folder, and the check that `millrace run` makes of it. No pickle is opened, no code
of the folder runs, and no folder takes more than twice the memory of the sound one.
"""

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.campaigns.campaigns import PRESET
from support.chat.model_folder import chat_model_folder
from support.models.folder_edits import MARK
from support.models.spoilt_folders import REFUSED, SOUND

from configs.load import load_config
from flows.campaign.prepare import check
from flows.cli.main import main
from millrace.errors import InputError
from millrace.models.loading import load_model
from tasks.fork_server import STAGES
from tasks.jobs import stages_here
from tasks.start import warm_up


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sound one, to be changed."""
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture(scope="module", autouse=True)
def memory_of_the_sound_one(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Most memory of this process and of one of its children after the check of the sound folder."""
    os.environ[MARK] = str(tmp_path_factory.mktemp("mark") / "mark")
    warm_up(stages_here(load_config(PRESET, [])))
    assert refusal(sound, tmp_path_factory.mktemp("first")) is None
    yield most_memory()
    STAGES.close()
    del os.environ[MARK]


def most_memory() -> tuple[int, int]:
    return tuple(resource.getrusage(whose).ru_maxrss for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def refusal(folder: Path, root: Path, *settings: str) -> str | None:
    """What `millrace run` would say before it starts anything; None if it would start."""
    config = load_config(PRESET, [f"model.path={folder}", f"storage.root={root}", *settings])
    try:
        check(config, "run", resume="never")
    except InputError as error:
        assert list(root.iterdir()) == []
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_sound_is_refused_in_a_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    edit, said = REFUSED[name]
    edit(folder)
    (tmp_path / "runs").mkdir()
    found = refusal(folder, tmp_path / "runs")
    assert found is not None
    assert re.search(said, found), found
    assert "\n" not in found
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_what_changes_nothing_is_the_same_model(name: str, folder: Path, tmp_path: Path, sound: Path) -> None:
    SOUND[name](folder)
    assert refusal(folder, tmp_path / "runs") is None
    found, expected = (dict(load_model(one, "float32").named_parameters()) for one in (folder, sound))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for message in messages %}", r"the chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", r"the chat template"),
        ("no turns", r"the chat template"),
    ],
)
def test_a_chat_template_that_can_not_be_used_is_refused_for_conversations_alone(
    template: str, said: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "runs").mkdir()
    found = refusal(folder, tmp_path / "runs", "prompts.chat=true")
    assert found is not None
    assert said in found
    assert refusal(folder, tmp_path / "runs") is None


@pytest.mark.parametrize("name", ["a million layers", "a value that is no number"])
def test_the_command_ends_with_the_sentence_and_exit_code_2(
    name: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit, said = REFUSED[name]
    edit(folder)
    code = main(["run", str(PRESET), "--root", str(tmp_path / "runs"), "--set", f"model.path={folder}"])
    found = capfd.readouterr().err
    assert code == 2, found
    assert "Traceback" not in found
    assert re.search(said, found), found
    assert not (tmp_path / "runs").exists()


def test_no_folder_took_more_than_twice_the_memory_of_the_sound_one(memory_of_the_sound_one: tuple[int, int]) -> None:
    for whose, now, of_the_sound_one in zip(
        ("the check", "its child"), most_memory(), memory_of_the_sound_one, strict=True
    ):
        print(f"most memory of {whose}: {now >> 10} MiB; with the sound folder {of_the_sound_one >> 10} MiB")
        assert now <= 2 * of_the_sound_one
