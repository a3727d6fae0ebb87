"""User errors as fields, and the formatter that makes a line of them."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path


class UserError(ValueError):
    """A user's mistake; the command prints it in one line and exits with 2.

        UserError(file="tools.json", read="no such file", expected="a JSON list")
        → tools.json: no such file; expected a JSON list

        UserError(key="seed", read=-1, expected="a whole number of at least 0")
        → seed is -1; expected a whole number of at least 0

    `file`: file, folder, URL or option that was read. `key`: setting, column or option that is wrong; `read` then
    completes "KEY is …". `read`: the value there. `expected`: a right value.
    """

    def __init__(self, read: object, *, file: object = None, key: str | None = None, expected: str | None = None):
        super().__init__(read)
        self.read = str(read)
        self.file = None if file is None else str(file)
        self.key = key
        self.expected = expected

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}: "
        subject = "" if self.key is None else f"{self.key} is "
        expected = "" if self.expected is None else f"; expected {self.expected}"
        return plain_line(f"{place}{subject}{self.read}{expected}")

    def fields(self) -> dict[str, str | None]:
        """The arguments that make an equal error: plain JSON, for another process."""
        return {"read": self.read, "file": self.file, "key": self.key, "expected": self.expected}


def plain_line(text: str) -> str:
    """Put text of a file, a library or a service on one line; characters that control a terminal are escaped."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class ConfigError(UserError):
    """A config can't be used. `mistakes` are at least one, each printed on its own line; the fields are the first's."""

    def __init__(self, mistakes: Sequence[UserError]) -> None:
        first = mistakes[0]
        super().__init__(first.read, file=first.file, key=first.key, expected=first.expected)
        self.args = (mistakes,)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.mistakes))


def near_names(path: str | os.PathLike[str]) -> str:
    """Suggest names like that of a missing file, or name the missing folder above it; "" if neither is known."""
    file = Path(path).expanduser()
    if "://" in str(path) or file.exists():
        return ""
    if missing := [folder for folder in file.parents if not folder.is_dir()]:
        return f"{missing[-1]} to be there"
    names = os.listdir(file.parent) if os.access(file.parent, os.R_OK) else []  # noqa: PTH208
    near = difflib.get_close_matches(file.name, sorted(names), cutoff=0.5)
    return f"{' or '.join(near)} in {file.parent}" if near else ""
