"""The template database, as real processes make and use it."""

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flows.deployment.database import copy_template

pytestmark = pytest.mark.slow

_PROCESS = """
import sys
from pathlib import Path
from flows.deployment.database import copy_template
copy_template(sys.argv[1], Path(sys.argv[2]))
"""


def _url(database: Path) -> str:
    return f"sqlite+aiosqlite:///{database}"


def _revision(database: Path) -> str:
    """Of Prefect's schema, in a sound database."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        [(revision,)] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return str(revision)


def _templates(cache: Path) -> list[Path]:
    """All of the folder's files are templates, each with its own checksum in its name."""
    found = sorted(cache.iterdir())
    for template in found:
        assert hashlib.sha256(template.read_bytes()).hexdigest() in template.name
    return found


@pytest.fixture(scope="module")
def made_at_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where two processes at once wanted the database `prefect.db`, and there was no template in `cache`."""
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-c", _PROCESS, _url(folder / "home" / "prefect.db"), str(folder / "cache")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    return folder


@pytest.fixture
def cache(made_at_once: Path, tmp_path: Path) -> Path:
    """A folder with a template, for one test."""
    return Path(shutil.copytree(made_at_once / "cache", tmp_path / "cache"))


def test_two_processes_at_once_make_a_template_and_one_database(made_at_once: Path) -> None:
    assert _templates(made_at_once / "cache")
    assert [path.name for path in (made_at_once / "home").iterdir()] == ["prefect.db"]
    assert _revision(made_at_once / "home" / "prefect.db")


def test_a_new_database_is_a_copy_of_the_template(cache: Path, tmp_path: Path) -> None:
    database = tmp_path / "new" / "home" / "prefect.db"
    copy_template(_url(database), cache)
    assert database.read_bytes() in [template.read_bytes() for template in _templates(cache)]
    database.write_bytes(b"somebody's runs")
    copy_template(_url(database), cache)
    assert database.read_bytes() == b"somebody's runs", "a database that exists stays as it is"
    # A copy, and not the same file: a server writes into it.
    assert not any(database.samefile(template) for template in _templates(cache))


def test_a_damaged_template_is_made_again(cache: Path, made_at_once: Path, tmp_path: Path) -> None:
    for template in _templates(cache):
        content = bytearray(template.read_bytes())
        content[len(content) // 2] ^= 1
        template.write_bytes(content)
    database = tmp_path / "prefect.db"
    copy_template(_url(database), cache)
    assert _revision(database) == _revision(made_at_once / "home" / "prefect.db")
    assert [template.read_bytes() for template in _templates(cache)] == [database.read_bytes()]


def test_without_a_usable_cache_the_database_is_left_to_prefect(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    copy_template(_url(tmp_path / "prefect.db"), tmp_path / "file" / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
