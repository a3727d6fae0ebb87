"""Several losses on the batches of a stored run, without training anything that is kept.

run ─► selected groups of step k ─► losses side by side ─► a row a loss
       whole batch of step k ─────► original: the run's own trainer, which goes the way that it went
                                        └─► log π of each token, held against what was stored then
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from configs.training import TrainingConfig
from millrace.errors import ReplayError
from millrace.losses.factory import check_needs, make_loss
from millrace.replay.comparison import Comparison, Row, comparison_schema
from millrace.replay.selection import Selection, select
from millrace.replay.side_by_side import SideBySide
from millrace.replay.stored import StoredRun
from millrace.replay.verify import start_trainer
from millrace.scored import ScoredGroup
from storage.errors import PartRemoved
from storage.schema import TRAJECTORY


def compare(
    run: StoredRun,
    losses: Sequence[str],
    *,
    selection: Selection,
    own_copies: bool,
    each: Callable[[list[Row]], None] = lambda rows: None,
) -> Comparison:
    """Takes the selected groups of each step through `losses`, which have the parameters of the run's config.

    `each` hears the rows of every step. The run's own trainer begins with its newest stored checkpoint before the
    range, or with the start model, and with the threads of the run's config; torch keeps these. Beside it a copy of
    policy and optimizer is held for each loss. `own_copies`: each loss trains its copy on the groups that are selected;
    else all are asked at the weights that the run had.

    Raises, before anything is trained: InputError for an unknown loss, ReplayError where nothing is selected, too
    little is stored or the vocabulary is another, ModelFolderError, StreamCorrupt. Later: StreamCorrupt for damaged
    trajectories, and TrainingDiverged.
    """
    training = TrainingConfig.model_validate(run.config["training"])
    chosen = [make_loss(training, name) for name in dict.fromkeys(losses)]
    for loss in chosen:
        check_needs(loss, TRAJECTORY.names)
    rows = select(run, selection)
    steps = run.groups["step"].to_numpy()[rows]
    start = max((version for version in run.checkpoints if version < steps[0]), default=0)
    on_the_way = range(start + 1, int(steps[-1]) + 1)
    _check_batches(run, on_the_way)
    torch.set_num_threads(training.threads)
    original, *copies = (start_trainer(run, start) for _ in range(1 + len(chosen)))
    for copy, loss in zip(copies, chosen, strict=True):
        copy.train_with(loss)
    side_by_side = SideBySide(original, copies, advantage=training.advantage, own_copies=own_copies)
    found: list[Row] = []
    for step in on_the_way:
        of_step = rows[steps == step]
        batch, compared = _read(run, run.batch(step), of_step)
        made, logprobs = side_by_side.step(batch, compared)
        if not made:
            continue
        head: Row = {
            "step": step,
            "staleness_mean": float(run.groups["staleness"].to_numpy()[of_step].mean()),
            "groups": len(compared),
            "logprob_error": _logprob_error(run, step, logprobs),
        }
        made = [head | row for row in made]
        found += made
        each(made)
    return Comparison(pa.Table.from_pylist(found, schema=comparison_schema([loss.name for loss in chosen])))


def _check_batches(run: StoredRun, steps: range) -> None:
    """Raises ReplayError unless all that the run trained on in `steps` is still there."""
    batches = [run.batch(step) for step in steps]
    for step, batch in zip(steps, batches, strict=True):
        if len(batch) == 0:
            raise ReplayError(f"{run.url}: what step {step} trained is not stored, and steps after it rest on it")
    run.check_stored(np.concatenate(batches))


def _read(
    run: StoredRun, batch: npt.NDArray[np.int64], compared: npt.NDArray[np.int64]
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """The groups of both, each read once."""
    rows: list[int] = np.union1d(batch, compared).tolist()
    groups: Mapping[int, ScoredGroup] = dict(zip(rows, run.read(rows), strict=True))
    return [groups[row] for row in batch.tolist()], [groups[row] for row in compared.tolist()]


def _logprob_error(run: StoredRun, step: int, found: Sequence[npt.NDArray[np.float32]]) -> float | None:
    """Largest difference to what the run stored of that step, nats; None where it is not there. Raises ReplayError."""
    if not run.logprobs_stored(step):
        return None
    try:
        stored = run.trainer_logprobs(step)
    except PartRemoved:
        return None
    if [len(one) for one in stored] != [len(one) for one in found]:
        raise ReplayError(
            f"{run.url}: with the scores in use step {step} trains {len(found)} rollouts, and it trained "
            f"{len(stored)}; expected the scores that the run trained with"
        )
    return float(max(np.abs(a - b).max() for a, b in zip(stored, found, strict=True)))
