"""Finds the compilers that torch needs on a host to compile layers.

    device    compiles with    needs
    cpu       Inductor         a C++ compiler, CXX or g++, and Python.h
    cuda      Triton           a C compiler, CC or gcc or clang, and Python.h

Inductor and Triton look for the same commands.
"""

import os
import shutil
import sysconfig
from pathlib import Path

_COMMANDS = {"cpu": ("CXX", "g++"), "cuda": ("CC", "gcc", "clang")}
"""Device type → the environment variable that names the compiler, then the commands that are tried without it."""


def find_compiler(device: str) -> str | None:
    """Path of the compiler for kernels of `device`, `cpu` or `cuda`; None without one."""
    variable, *commands = _COMMANDS[device]
    chosen = os.environ.get(variable)
    return next(filter(None, map(shutil.which, [chosen] if chosen else commands)), None)


def has_python_header() -> bool:
    """Whether kernels can be built as modules of this Python."""
    return Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h").exists()


def missing_for_compilation(device: str) -> str:
    """Names everything missing here to compile for `device`: `no C compiler and no Python.h`; empty if nothing."""
    language = "C++" if device == "cpu" else "C"
    needs = {f"{language} compiler": find_compiler(device), "Python.h": has_python_header()}
    return " and ".join(f"no {name}" for name, there in needs.items() if not there)
