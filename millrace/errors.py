"""The errors that Millrace raises on purpose, how processes end with them, and their form between processes.

Each also inherits the standard error that it refines.

| error                                        | exit code of a stage | then the stage           | `millrace`   |
|----------------------------------------------|----------------------|--------------------------|--------------|
| InputError; a store that needs a person      | 2, USER_ERROR        | stays ended              | 2            |
| LedgerMismatch                               | 70, MISCOUNTED       | stays ended              | 1            |
| none: it was asked to stop                   | 75, DRAINED          | stays ended              |              |
| Fenced                                       | 76, FENCED           | stays ended              | 3            |
| PlaceYielded                                 | 77, YIELDED          | asks for another place   |              |
| RolledBack                                   | 78, ROLLED_BACK      | starts again             |              |
| any other; elsewhere it is a StageDied       | 1, or a signal       | starts again, a few times| 1            |

A process passes an error on in one form of JSON (`to_json`, `from_json`), which keeps key and expected value:

    {"kind": "InputError", "read": "0", "key": "training.max_steps", "expected": "at least 1"}

    stage ──a line, exit code──► supervisor ──status record──► controller ─► terminal, flow run
                                 (or on another host)
    check in a child process ──reply──► controller
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.errors import UserError, plain_line
from storage.errors import Fenced, PartRemoved, SchemaUnknown, StoreDenied, StoreFull, StoreRefused, StreamCorrupt

USER_ERROR, MISCOUNTED, DRAINED, FENCED, YIELDED, ROLLED_BACK = 2, 70, 75, 76, 77, 78
"""Exit codes of a stage. 70 and 75 are EX_SOFTWARE and EX_TEMPFAIL."""

INSTALL = ".venv/bin/pip install --constraint constraints.txt --editable '.[{}]'"
"""The command that installs an extra of Millrace."""


class MillraceError(Exception):
    """Root of the tree."""


class InputError(MillraceError, UserError):
    """A user error outside of the schema: an option, a file, or a config that does not fit the machine."""


class MissingExtra(InputError):
    """An optional package is not installed. `extra` is the extra of Millrace that installs it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed",
            expected=f"`{INSTALL.format(extra)}`, run where Millrace is",
        )
        self.args = (what, package, extra)
        self.package = package
        self.extra = extra


class PromptsError(InputError):
    """A prompt source is missing, malformed, or holds too few prompts."""


class ChatError(InputError):
    """A conversation can't be written or continued in a model's chat template."""


class ModelFolderError(InputError):
    """A folder is not a Hugging Face causal language model with its tokenizer."""


class TrainingDiverged(InputError):
    """A step's gradient is not finite. The policy is unchanged, and a retry would fail in the same way."""


class DevicesInUse(InputError):
    """A host has enough GPUs, but others hold some of them."""


class DeviceOutOfMemory(InputError):
    """A step needs more memory than the trainer's device has. A retry would fail in the same way."""


class RunExists(InputError):
    """The run id is taken and the run was not asked to resume."""


class RunMissing(InputError, FileNotFoundError):
    """No run is stored at a URL."""


class ReplayError(InputError):
    """A stored run does not have the data that a replay needs."""


class WeightsCorrupt(MillraceError, ValueError):
    """A policy version arrived damaged, or not as weights at all."""


class WeightsMismatch(MillraceError, ValueError):
    """A policy version has other tensors than the engine's model."""


class WeightsNotReceived(MillraceError, RuntimeError):
    """A policy version did not arrive whole in the engine, which waits for another if its model has changed."""


class StageDied(MillraceError, RuntimeError):
    """A stage's process ended and could not be brought back."""


class RolledBack(MillraceError, RuntimeError):
    """Training collapsed, and continues from an earlier checkpoint in a new process."""


class PlaceYielded(MillraceError, RuntimeError):
    """A host of the trainer has given its place in the work pool back, because the leading host is away."""


class LedgerMismatch(MillraceError, RuntimeError):
    """The generated amount is not the sum of trained, dropped, buffered and in flight."""


EXIT_CODES: Mapping[type[Exception], int] = {
    InputError: USER_ERROR,
    LedgerMismatch: MISCOUNTED,
    Fenced: FENCED,
    PlaceYielded: YIELDED,
    RolledBack: ROLLED_BACK,
}
"""Exit codes by kind of error. In another process, every other error is a StageDied."""
FINAL = (InputError, LedgerMismatch, Fenced, PlaceYielded)
"""After these a stage is not started again: it would end in the same way."""
_FIXED_BY_A_PERSON = (UserError, StoreRefused, StoreDenied, StoreFull, StreamCorrupt, SchemaUnknown, PartRemoved)
_KINDS: tuple[Any, ...] = (PromptsError, ModelFolderError, *EXIT_CODES, StageDied)


def exit_code(error: Exception) -> int | None:
    """The exit code of a stage that ends with `error`; None for a fault, which leaves its traceback."""
    if isinstance(error, _FIXED_BY_A_PERSON):
        return USER_ERROR
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)


def to_json(error: Exception) -> dict[str, str]:
    """The error for another process, which reads it with `from_json`."""
    default = StageDied if exit_code(error) is None else InputError
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), default)
    fields = error.fields() if isinstance(error, UserError) else {"read": str(error)}
    return {"kind": kind.__name__, **{name: text for name, text in fields.items() if text is not None}}


def from_json(values: Mapping[str, str], where: str = "") -> Exception:
    """The error that `to_json` was given. `where`, such as a host, begins its line. Raises KeyError for other JSON."""
    fields = dict(values)
    kind = {kind.__name__: kind for kind in _KINDS}[fields.pop("kind")]
    if where:
        first = "file" if issubclass(kind, InputError) else "read"
        fields[first] = ": ".join([where, fields[first]] if first in fields else [where])
    error: Exception = kind(fields.pop("read"), **fields)
    return error


def one_line(error: BaseException | str) -> str:
    """An error of a library, a service or a user's code on one line; its type where it has no text."""
    return plain_line(" ".join(str(error).split())) or type(error).__name__


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an error of the file system in the block an InputError about `path`, which a user chose."""
    try:
        yield
    except OSError as error:
        # Errors of ours that are an OSError have no number.
        if error.errno is None:
            raise
        raise InputError(f"can't be written ({error.strerror})", file=path, expected="another place") from error
