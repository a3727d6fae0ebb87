"""A user's function, named in a config by its import path."""

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.forking.process_settings import working_folder_first


def imported_function(key: str, path: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function at `path`, `package.module:function`, that the config's `key` names; it is called by position.

    Raises InputError if its module can't be imported, or it can't be called with as many arguments as `parameters`.
    """
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        raise unusable(key, path, "package.module:function")
    try:
        with working_folder_first():
            module = importlib.import_module(module_name)
    # Importing a module may raise anything, SystemExit too.
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise unusable(key, path, f"a module that can be imported ({reason})") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise unusable(key, path, f'a function "{attribute}" in {module_name}')
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise unusable(key, path, f"a function of ({', '.join(parameters)}) ({error})") from error
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise unusable(key, path, "a function that is not async")
    if inspect.isgeneratorfunction(function):
        raise unusable(key, path, "a function that returns its result, not a generator that yields it")
    return function


def source_hash(path: str) -> str | None:
    """SHA-256 of the module's file and of its neighbours in a package, since the function may call others in them;
    12 hex digits. None if it has no file."""
    with working_folder_first():
        try:
            found = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            return None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return None
    file = Path(found.origin)
    files = sorted(file.parent.glob("*.py")) if "." in found.name or file.name == "__init__.py" else [file]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]


def unusable(key: str, path: str | None, expected: str) -> InputError:
    """The sentence about a path that can't be used."""
    shown = "null" if path is None else f'"{path}"'
    return InputError(f"{key} is {shown}; expected {expected}")
