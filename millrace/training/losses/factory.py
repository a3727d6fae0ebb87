"""The losses by their names in configs, and losses of your own, named by their import path."""

from collections.abc import Callable
from typing import Any

import torch

from configs.training import TrainingConfig
from millrace.errors import InputError, TrainingDiverged
from millrace.rewards.function import imported_function
from millrace.training.losses import clipped, weighted
from millrace.training.losses.base import LossInputs, LossOutputs

LossFunction = Callable[[LossInputs, Any], LossOutputs]
"""Gets the parameters of its name in `configs.losses`; a loss of your own gets the section `training`."""

_BUILT_IN: tuple[LossFunction, ...] = (
    *(weighted.aipo, weighted.reinforce, clipped.ppo_clip, clipped.decoupled_ppo, weighted.tis, weighted.sequence_tis),
    *(weighted.icepop, weighted.sequence_mask, weighted.geometric_mask, weighted.cispo, clipped.gspo, clipped.sapo),
    *(weighted.dppo_tv, weighted.topr, weighted.cross_entropy),
)
LOSSES = {function.__name__: function for function in _BUILT_IN}


class Loss:
    """A loss with its parameters."""

    def __init__(self, name: str, function: LossFunction, parameters: object) -> None:
        self.name = name
        self.needs_advantage = name in LOSSES and name != weighted.cross_entropy.__name__
        """Whether a token without advantage has no gradient, so that a backward pass is spared."""
        self.parameters = parameters
        self._function = function

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Computes loss and weight of each token."""
        return self._function(inputs, self.parameters)


class OwnLoss(Loss):
    """A loss `package.module:function`, tried when it is made. Keep no state in it: it may be called twice for a token.

    Raises InputError if it can't be imported, fails or returns something else than `LossOutputs`, and TrainingDiverged
    for a loss that is not finite, unless the config has such tokens masked.
    """

    def __init__(self, path: str, training: TrainingConfig) -> None:
        super().__init__(path, imported_function("training.loss", path, ("tokens", "training")), training)
        self._masks_non_finite = training.non_finite == "mask"
        with torch.enable_grad():
            self(_sample())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        try:
            outputs = super().__call__(inputs)
        except Exception as error:  # whatever a user's function raises
            raise self._unusable(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        self._check(outputs, inputs)
        return LossOutputs(outputs.loss, *(values.detach() for values in outputs[1:4]))

    def _check(self, outputs: object, inputs: LossInputs) -> None:
        if not isinstance(outputs, LossOutputs):
            raise self._unusable(f"it returned {type(outputs).__name__}; expected LossOutputs")
        expected = tuple(inputs.trainer_logprobs_N.shape)
        for name, values in zip(outputs._fields, outputs[:4], strict=False):
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != expected:
                kind = f"of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
                raise self._unusable(f"its {name} is {kind}; expected a tensor of shape {list(expected)}")
        needs_gradient = inputs.trainer_logprobs_N.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not outputs.loss.requires_grad:
            raise self._unusable("its loss has no gradient; expected one that depends on inputs.trainer_logprobs_N")
        bad_N = ~(outputs.loss.detach().isfinite() & outputs.weight.isfinite())
        if not self._masks_non_finite and (count := int(bad_N.sum())):
            raise TrainingDiverged(
                f"the loss {self.name} or its weight is not finite at {count} of {len(bad_N)} trainable tokens; "
                "expected finite numbers"
            )

    def _unusable(self, problem: str) -> InputError:
        return InputError(f'"{self.name}", which can\'t be used: {problem}', key="training.loss")


def make_loss(training: TrainingConfig, name: str | None = None) -> Loss:
    """The loss called `name`, or the one that `training` names, with the parameters in `training`.

    Raises InputError for an unknown name, and for a function `package.module:function` that can't be used.
    """
    name = training.loss.name if name is None else name
    if ":" in name:
        return OwnLoss(name, training)
    if name not in LOSSES:
        expected = f"one of {', '.join(LOSSES)}, or package.module:function"
        raise InputError(f'"{name}"', key="loss", expected=expected)
    return Loss(name, LOSSES[name], training.with_loss(name).loss)


def _sample() -> LossInputs:
    """Three responses, the last one without tokens: as a trainer may give them."""
    return LossInputs(
        trainer_logprobs_N=torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True),
        rollout_logprobs_N=torch.tensor([-0.5, -1.2, -1.7, -0.2]),
        advantages_N=torch.tensor([1.0, 1.0, -0.5, -0.5]),
        response_N=torch.tensor([0, 0, 1, 1]),
        num_responses=3,
        staleness_N=torch.tensor([0, 0, 2, 2]),
    )
