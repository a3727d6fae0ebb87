"""Which environment a run plays."""

import importlib

from millrace.errors import InputError
from millrace.forking.working_folder import working_folder_first
from millrace.generation.environments.base import ChatEnvironment, Environment
from millrace.generation.environments.calculator import Calculator
from millrace.generation.environments.calculator_tool import CalculatorTool

AnyEnvironment = type[Environment] | type[ChatEnvironment]

_KNOWN: dict[str, AnyEnvironment] = {"calculator": Calculator, "calculator_tool": CalculatorTool}


def environment_class(name: str | None) -> AnyEnvironment | None:
    """The environment that configs call `name`, one object per trajectory; None where a run has none.

    A name is `calculator`, `calculator_tool` or an import path `package.module:Class`. Raises InputError if there is no
    such class.
    """
    if name is None or name in _KNOWN:
        return _KNOWN[name] if name else None
    said = f'environment.name is "{name}"; expected {", ".join(sorted(_KNOWN))} or package.module:Class'
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise InputError(said)
    try:
        with working_folder_first():
            found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise InputError(f"{said} ({' '.join(f'{type(error).__name__}: {error}'.split())})") from error
    if not (isinstance(found, type) and issubclass(found, Environment | ChatEnvironment)):
        raise InputError(
            f"{said} with a subclass of Environment or ChatEnvironment of millrace.generation.environments.base"
        )
    return found
