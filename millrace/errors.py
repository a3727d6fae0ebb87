"""The errors that Millrace raises on purpose. Each also inherits the standard error that it refines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import UserError, plain_line

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
