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

_KINDS_WITHOUT_RESULT = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


def imported_function(key: str, path: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Import the function `package.module:function` that the config's `key` names; it is called by position.

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
        raise unusable(key, path, f"a module that can be imported ({type(error).__name__}: {error})") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise unusable(key, path, f'a function "{attribute}" in {module_name}')
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise unusable(key, path, f"a function of ({', '.join(parameters)}) ({error})") from error
    if any(is_kind(function) for is_kind in _KINDS_WITHOUT_RESULT):
        raise unusable(key, path, "a function that returns its result: neither async nor a generator")
    return function


def source_hash(path: str) -> str | None:
    """Return the SHA-256 of the module's file and its neighbors in a package, 12 hex digits; None if it has no file.

    The neighbors count because the function may call others in them.
    """
    with working_folder_first():
        try:
            spec = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    file = Path(spec.origin)
    files = sorted(file.parent.glob("*.py")) if "." in spec.name or file.name == "__init__.py" else [file]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]


def unusable(key: str, path: str | None, expected: str) -> InputError:
    """Make the error about a path that can't be used."""
    return InputError("null" if path is None else f'"{path}"', key=key, expected=expected)
