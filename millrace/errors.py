"""The errors Millrace raises on purpose. Each also inherits the standard error it refines.

MillraceError
├── InputError (ValueError)             a person's mistake; the command exits with 2
│   ├── PromptsError                    a prompt source can't be used
│   ├── ModelFolderError                a model folder can't be used
│   ├── TrainingDiverged                a step's gradient is not finite
│   ├── RunExists                       the run id is taken
│   ├── RunMissing                      there is no such run
│   └── ReplayError                     what is stored of a run can't be replayed as asked
├── WeightsCorrupt (ValueError)         a policy version arrived damaged
├── WeightsMismatch (ValueError)        a policy version is of another model
├── StageDied (RuntimeError)            a stage's process ended and could not be brought back
└── LedgerMismatch (RuntimeError)       rollouts were lost or counted twice
"""


class MillraceError(Exception):
    """Root of the tree."""


class InputError(MillraceError, ValueError):
    """A person's mistake: one sentence saying what, where, and what was expected."""


class PromptsError(InputError):
    """A prompt source is missing, malformed, or holds too few prompts."""


class ModelFolderError(InputError):
    """A folder is not a Hugging Face causal language model with its tokenizer."""


class TrainingDiverged(InputError):
    """A step's gradient is not finite; the policy is as it was before. Trying again would end in the same."""


class RunExists(InputError):
    """The run id is taken and the run was not asked to resume."""


class RunMissing(InputError, FileNotFoundError):
    """There is no run at the place named."""


class ReplayError(InputError):
    """A run stored too little for what is asked of it, or nothing of it is what was asked for."""


class WeightsCorrupt(MillraceError, ValueError):
    """A policy version arrived damaged, or not as weights at all."""


class WeightsMismatch(MillraceError, ValueError):
    """A policy version has other tensors than the engine's model."""


class StageDied(MillraceError, RuntimeError):
    """A stage's process ended and could not be brought back."""


class LedgerMismatch(MillraceError, RuntimeError):
    """What was generated does not equal what was trained, buffered, in flight and dropped together."""
