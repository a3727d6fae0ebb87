"""A loss of your own, named by its import path."""

import torch

from configs.training import TrainingConfig
from millrace.errors import InputError, TrainingDiverged
from millrace.rewards.import_path import imported_function
from millrace.training.losses.base import Loss, LossTokens, TokenLosses


class FunctionLoss(Loss):
    """Calls `package.module:function` as `function(tokens, training)`, by position.

    `tokens` is a `LossTokens` and `training` the section of the config. It returns `TokenLosses`, as `weighted` and
    `surrogate` of `millrace.training.losses.base` make it. What it does has to follow from its arguments alone.
    """

    needs_advantage = False

    def __init__(self, training: TrainingConfig, path: str) -> None:
        """Tries the function out. Raises InputError if it can't be imported or called, or returns something else."""
        super().__init__(training)
        self.name = path
        self._function = imported_function("training.loss", path, ("tokens", "training"))
        with torch.enable_grad():
            self(_sample())

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """Raises InputError if the function fails or returns something else.

        Raises TrainingDiverged for a loss that is not finite, unless the config has such tokens masked.
        """
        try:
            found = self._function(tokens, self.training)
        except Exception as error:  # whatever a user's function raises
            raise self._wrong(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        self._check(found, tokens)
        return TokenLosses(*found[:1], *(values.detach() for values in found[1:]))

    def _check(self, found: object, tokens: LossTokens) -> None:
        if not isinstance(found, TokenLosses):
            raise self._wrong(f"it returned {type(found).__name__}; expected TokenLosses")
        expected = tuple(tokens.trainer_logprobs_N.shape)
        for name, values in found._asdict().items():
            if not isinstance(values, torch.Tensor):
                raise self._wrong(f"its {name} is of type {type(values).__name__}; expected a tensor")
            if tuple(values.shape) != expected:
                raise self._wrong(
                    f"its {name} has the shape {list(values.shape)}; expected {list(expected)}, per token"
                )
        needs_gradient = tokens.trainer_logprobs_N.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not found.loss.requires_grad:
            raise self._wrong("its loss has no gradient; expected one that depends on tokens.trainer_logprobs_N")
        if self.training.non_finite == "mask":
            return
        bad_N = ~(found.loss.detach().isfinite() & found.weight.isfinite())
        if count := int(bad_N.sum()):
            raise TrainingDiverged(
                f"the loss {self.name} or its weight is not finite at {count} of {len(bad_N)} tokens that carry loss; "
                "expected finite numbers"
            )

    def _wrong(self, what: str) -> InputError:
        return InputError(f'training.loss is "{self.name}", which can\'t be used: {what}')


def _sample() -> LossTokens:
    """Three responses, the last one without tokens: as a trainer may give them."""
    trainer_logprobs_N = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True)
    return LossTokens(
        trainer_logprobs_N=trainer_logprobs_N,
        rollout_logprobs_N=torch.tensor([-0.5, -1.2, -1.7, -0.2]),
        advantages_N=torch.tensor([1.0, 1.0, -0.5, -0.5]),
        response_N=torch.tensor([0, 0, 1, 1]),
        num_responses=3,
        staleness_N=torch.tensor([0, 0, 2, 2]),
    )
