"""The Prefect server's SQLite database: a copy of a migrated empty one, and connections that can't freeze the server.

Hundreds of migrations take seconds:

    ~/.cache/millrace/prefect-<version>-<sha256>.db     the template: complete from the moment it has its name
        │ none, or damaged: migrate an empty database, rename it to its own checksum
        └─► copy ─► PREFECT_HOME/prefect.db, if there is none

Processes may do this at the same time: each migrates a file of its own, and no file is ever replaced. If the cache or
the database's folder can't be used, nothing is copied, and the server migrates its database itself, as Prefect does.

A statement that fails must not freeze the server:

    event loop's thread            connection's own thread
    a statement ─────────────────► fails: "database is locked"; its cursor lives on in the error's traceback
    another statement ───────────► waits up to 60 s for a lock, and meanwhile holds the connection's mutex
    frees the old cursor: waits for that mutex, so the event loop stands still, and so does who holds the lock

A cursor that is closed needs no mutex when it is freed. So each closes itself as soon as a statement of its fails, in
the connection's own thread, where nothing else can be under way.
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import SQLAlchemyError

_SCHEME = "sqlite+aiosqlite:///"


def copy_template(url: str, cache: Path) -> None:
    """Creates the database at `url`, as Prefect spells it, unless it exists or is no file of SQLite's.

    `cache` is the folder of the template, which is made if it is missing or damaged.
    """
    path = _path(url)
    if path is None or path.exists():
        return
    # Only faster than what the server does without a template: no reason to fail.
    with contextlib.suppress(OSError, sqlite3.Error, SQLAlchemyError):
        content = _read_template(cache) or _make_template(cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _new_file(path.parent) as copy, contextlib.suppress(FileExistsError):
            copy.write_bytes(content)
            # Unlike a rename, a link leaves a database that has been created meanwhile as it is.
            path.hardlink_to(copy)


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "millrace"


def _path(url: str) -> Path | None:
    """The file of an SQLite database; None for other databases and for one in memory."""
    return Path(url.removeprefix(_SCHEME)) if url.startswith(_SCHEME + "/") and "?" not in url else None


def _name(sha256: str) -> str:
    return f"prefect-{version('prefect')}-{sha256}.db"


def _read_template(cache: Path) -> bytes | None:
    """The template of the installed version of Prefect; None if there is none. Removes damaged ones."""
    for path in cache.glob(_name("*")):
        content = path.read_bytes()
        if path.name == _name(hashlib.sha256(content).hexdigest()):
            return content
        path.unlink(missing_ok=True)
    return None


def _make_template(cache: Path) -> bytes:
    """Migrates an empty database, keeps it as the template, and returns it. Raises OSError or a database's error."""
    cache.mkdir(parents=True, exist_ok=True)
    with _new_file(cache) as path:
        asyncio.run(_migrate(path))
        with contextlib.closing(sqlite3.connect(path)) as connection:
            # Everything into the one file.
            connection.execute("PRAGMA journal_mode = DELETE")
        content = path.read_bytes()
        with contextlib.suppress(FileExistsError):
            (cache / _name(hashlib.sha256(content).hexdigest())).hardlink_to(path)
    return content


async def _migrate(path: Path) -> None:
    # Imported late: a process that finds a template needs none of it.
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import provide_database_interface, temporary_database_config

    # Prefect keeps the first configuration that it is asked for; the server's own comes after this one.
    with temporary_database_config(AioSqliteConfiguration(f"{_SCHEME}{path}")):
        await provide_database_interface().create_db()


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """The path of a new file in `folder`; at the end it is removed, with what SQLite put beside it."""
    with tempfile.TemporaryDirectory(prefix=".prefect-", dir=folder) as temporary:
        yield Path(temporary) / "prefect.db"


def close_failed_cursors() -> None:
    """From now on, the cursors of this process's new SQLite connections close themselves when they fail."""
    event.listen(Engine, "do_connect", _choose_factory)


def _choose_factory(dialect: Any, record: Any, arguments: list[Any], options: dict[str, Any]) -> None:
    if dialect.name == "sqlite":
        options.setdefault("factory", _Connection)


class _Cursor(sqlite3.Cursor):
    def execute(self, *arguments: Any) -> "_Cursor":
        return self._attempt(super().execute, *arguments)

    def executemany(self, *arguments: Any) -> "_Cursor":
        return self._attempt(super().executemany, *arguments)

    def _attempt(self, statement: Callable[..., Any], *arguments: Any) -> "_Cursor":
        try:
            statement(*arguments)
        except sqlite3.Error:
            self.close()
            raise
        return self


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)
