"""The losses by their names in configs."""

from collections.abc import Collection

from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.training.losses.base import Loss
from millrace.training.losses.clipped import Gspo, PpoClip
from millrace.training.losses.decoupled_ppo import DecoupledPpo
from millrace.training.losses.function import FunctionLoss
from millrace.training.losses.masks import DppoTv, GeometricMask, IcePop, SequenceMask, SequenceTis
from millrace.training.losses.reinforce import Reinforce, Topr
from millrace.training.losses.sapo import Sapo
from millrace.training.losses.truncated import Aipo, Cispo, Tis

_CLASSES: tuple[type[Loss], ...] = (
    Aipo,
    Reinforce,
    PpoClip,
    DecoupledPpo,
    Tis,
    SequenceTis,
    IcePop,
    SequenceMask,
    GeometricMask,
    Cispo,
    Gspo,
    Sapo,
    DppoTv,
    Topr,
)
LOSSES = {loss.name: loss for loss in _CLASSES}


def make_loss(training: TrainingConfig, name: str | None = None) -> Loss:
    """Make the loss called `name`, or the one that `training` names, with the parameters in `training`.

    Raises InputError for an unknown name, and for a function `package.module:function` that can't be used.
    """
    name = training.loss.name if name is None else name
    if ":" in name:
        return FunctionLoss(training, name)
    if name not in LOSSES:
        raise InputError(f'there is no loss "{name}"; expected one of {", ".join(LOSSES)}, or package.module:function')
    return LOSSES[name](training.with_loss(name))


def check_needs(loss: Loss, columns: Collection[str]) -> None:
    """Raises InputError unless trajectories with these `columns` have all that `loss` reads."""
    if missing := sorted(loss.needs - set(columns)):
        raise InputError(
            f"the loss {loss.name} reads {', '.join(missing)}, which the stored trajectories lack; "
            "expected a loss that does without, or a run that stored more"
        )
