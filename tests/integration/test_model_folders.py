"""Model folders with something wrong in them: refused before anything starts, or the same model as the sound one.

Each case is one change of a sound folder, and the check that `millrace run` makes of it. No pickle is opened, no code
of the folder runs, and no folder takes more than twice the memory of the sound one.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.campaigns.campaigns import PRESET
from support.chat.model_folder import chat_model_folder
from support.models.spoilt_folders import MARK, REFUSED, SOUND

from configs.load import load_config
from flows.campaign.prepare import check
from flows.cli.main import main
from millrace.errors import InputError
from millrace.forking.stages import STAGES
from millrace.models.loading import load_model
from tasks.jobs import stages_here
from tasks.start import warm_up


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sound folder, to be changed."""
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
    """The refusal of `millrace run` before it starts anything; None if it would start."""
    config = load_config(PRESET, [f"model.path={folder}", f"storage.root={root}", *settings])
    try:
        check(config, "run", resume="never")
    except InputError as error:
        assert list(root.iterdir()) == []
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_spoilt_folder_is_refused_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    REFUSED[name](folder)
    (tmp_path / "runs").mkdir()
    message = refusal(folder, tmp_path / "runs")
    assert message is not None
    assert str(folder) in message or "docs/models.md" in message
    assert "\n" not in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_what_changes_nothing_is_the_same_model(name: str, folder: Path, tmp_path: Path, sound: Path) -> None:
    SOUND[name](folder)
    assert refusal(folder, tmp_path / "runs") is None
    parameters, expected = (dict(load_model(one, "float32").named_parameters()) for one in (folder, sound))
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in parameters)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", ["{% for message in messages %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "no turns"]
)
def test_an_unusable_chat_template_is_refused_for_conversations_alone(
    template: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "runs").mkdir()
    assert "the chat template" in str(refusal(folder, tmp_path / "runs", "prompts.chat=true"))
    assert refusal(folder, tmp_path / "runs") is None


@pytest.mark.parametrize("name", ["a million layers", "a value that is no number"])
def test_the_command_ends_with_the_sentence_and_exit_code_2(
    name: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    REFUSED[name](folder)
    code = main(["run", str(PRESET), "--root", str(tmp_path / "runs"), "--set", f"model.path={folder}"])
    message = capfd.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message
    assert str(folder) in message or "docs/models.md" in message
    assert not (tmp_path / "runs").exists()


def test_no_folder_took_more_than_twice_the_memory_of_the_sound_one(memory_of_the_sound_one: tuple[int, int]) -> None:
    for whose, most, sound in zip(("the check", "its child"), most_memory(), memory_of_the_sound_one, strict=True):
        print(f"most memory of {whose}: {most >> 10} MiB; with the sound folder {sound >> 10} MiB")
        assert most <= 2 * sound
