"""Whether the functions of one's own that a config names can be used, before anything starts."""

from configs.training import TrainingConfig
from millrace.training.losses.factory import make_loss
from millrace.training.samples import make_estimator


def check_own_functions(training: TrainingConfig) -> None:
    """Imports and tries out loss and advantage. Raises InputError with one sentence about the first mistake."""
    make_loss(training)
    make_estimator(training.advantage)
