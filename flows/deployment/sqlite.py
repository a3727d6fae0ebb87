"""SQLite connections that can't freeze the Prefect server when a statement fails.

    event loop's thread            connection's own thread
    a statement ─────────────────► fails: "database is locked"; its cursor lives on in the error's traceback
    another statement ───────────► waits up to 60 s for a lock, and meanwhile holds the connection's mutex
    frees the old cursor: waits for that mutex, so the event loop stands still, and so does who holds the lock

A cursor that is closed needs no mutex when it is freed. So each closes itself as soon as a statement of its fails, in
the connection's own thread, where nothing else can be under way.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, event


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
