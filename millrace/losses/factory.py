"""Which loss a config's name stands for."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from millrace.errors import InputError
from millrace.losses.aipo import Aipo
from millrace.losses.base import Loss
from millrace.losses.cispo import Cispo
from millrace.losses.decoupled_ppo import DecoupledPpo
from millrace.losses.dppo_tv import DppoTv
from millrace.losses.geometric_mask import GeometricMask
from millrace.losses.gspo import Gspo
from millrace.losses.icepop import IcePop
from millrace.losses.ppo_clip import PpoClip
from millrace.losses.reinforce import Reinforce
from millrace.losses.sapo import Sapo
from millrace.losses.sequence_mask import SequenceMask
from millrace.losses.tis import Tis
from millrace.losses.topr import Topr

if TYPE_CHECKING:
    from configs.training import TrainingConfig

LOSSES: dict[str, Callable[["TrainingConfig"], Loss]] = {
    Aipo.name: lambda training: Aipo(max_importance_ratio=training.max_importance_ratio),
    Reinforce.name: lambda training: Reinforce(),
    PpoClip.name: lambda training: PpoClip(
        clip_low=training.clip_low, clip_high=training.clip_high, **training.losses.ppo_clip.model_dump()
    ),
    DecoupledPpo.name: lambda training: DecoupledPpo(
        clip_low=training.clip_low, clip_high=training.clip_high, **training.losses.decoupled_ppo.model_dump()
    ),
    Tis.name: lambda training: Tis(**training.losses.tis.model_dump()),
    IcePop.name: lambda training: IcePop(**training.losses.icepop.model_dump()),
    SequenceMask.name: lambda training: SequenceMask(**training.losses.sequence_mask.model_dump()),
    GeometricMask.name: lambda training: GeometricMask(**training.losses.geometric_mask.model_dump()),
    Cispo.name: lambda training: Cispo(clip_high=training.clip_high),
    Gspo.name: lambda training: Gspo(**training.losses.gspo.model_dump()),
    Sapo.name: lambda training: Sapo(**training.losses.sapo.model_dump()),
    DppoTv.name: lambda training: DppoTv(**training.losses.dppo_tv.model_dump()),
    Topr.name: lambda training: Topr(),
}


def make_loss(training: "TrainingConfig", name: str | None = None) -> Loss:
    """Make the loss called `name`, or the one that `training` names, with the parameters in `training`.

    Raises InputError for a name that no loss has.
    """
    name = training.loss if name is None else name
    if name not in LOSSES:
        raise InputError(f'there is no loss "{name}"; expected one of {", ".join(LOSSES)}')
    return LOSSES[name](training)


def check_needs(loss: Loss, columns: Collection[str]) -> None:
    """Raises InputError unless trajectories with these `columns` have all that `loss` reads."""
    if missing := sorted(loss.needs - set(columns)):
        raise InputError(
            f"the loss {loss.name} reads {', '.join(missing)}, which the stored trajectories lack; "
            "expected a loss that does without, or a run that stored more"
        )
