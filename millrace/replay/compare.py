"""Several losses on the batches of a stored run; nothing that is trained here is kept.

run ─► selected groups of step k ─► losses side by side ─► a row per loss
       whole batch of step k ─────► original: the run's own trainer repeats its steps
                                        └─► log π of each token, compared with what was stored
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from configs.replay import Selection
from configs.training import TrainingConfig
from millrace.errors import ReplayError
from millrace.replay.comparison import Comparison, Row, comparison_schema
from millrace.replay.side_by_side import SideBySide
from millrace.replay.sources.selection import select
from millrace.replay.sources.source_run import SourceRun
from millrace.replay.verify import start_trainer
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.losses.factory import make_loss
from storage.errors import PartRemoved


def compare(
    run: SourceRun,
    losses: Sequence[str],
    *,
    selection: Selection,
    each: Callable[[list[Row]], None] = lambda rows: None,
    on_progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Computes each of `losses`, with the parameters of the run's config, on the selected groups of each step.

    `each` gets the rows of every step, and `on_progress` is called many times in each. The run's own trainer starts
    from its newest stored checkpoint before the range, or from the start model, with the number of threads of the run's
    config, which torch keeps. One copy of policy and optimizer per loss is held beside it.

    Raises, before anything is trained: InputError for an unknown loss, ReplayError if nothing is selected, too little
    is stored or the vocabulary differs, ModelFolderError, StreamCorrupt. Later: StreamCorrupt for damaged trajectories,
    and TrainingDiverged.
    """
    training = TrainingConfig.model_validate(run.config["training"])
    chosen = [make_loss(training, name) for name in dict.fromkeys(losses)]
    rows = select(run, selection)
    steps = run.groups["step"].to_numpy()[rows]
    start = max((version for version in run.checkpoints if version < steps[0]), default=0)
    repeated = range(start + 1, int(steps[-1]) + 1)
    _check_batches(run, repeated)
    torch.set_num_threads(training.threads)
    original = start_trainer(run, start)
    # Gradients compare only at the same weights.
    copies = [start_trainer(run, start, one_update=True) for _ in chosen]
    original.on_progress = on_progress
    for copy, loss in zip(copies, chosen, strict=True):
        copy.on_progress = on_progress
        copy.set_loss(loss)
    side_by_side = SideBySide(original, copies, advantage=training.advantage, selection=training.selection)
    table: list[Row] = []
    for step in repeated:
        selected = rows[steps == step]
        batch, compared = _read(run, run.batch(step), selected)
        loss_rows, logprobs = side_by_side.step(batch, compared)
        if not loss_rows:
            continue
        head: Row = {
            "step": step,
            "staleness_mean": float(run.groups["staleness"].to_numpy()[selected].mean()),
            "groups": len(compared),
            "logprob_error": _logprob_error(run, step, logprobs),
        }
        step_rows = [head | row for row in loss_rows]
        table += step_rows
        each(step_rows)
    return Comparison(pa.Table.from_pylist(table, schema=comparison_schema([loss.name for loss in chosen])))


def _check_batches(run: SourceRun, steps: range) -> None:
    """Raises ReplayError unless everything that the run trained on in `steps` still exists."""
    batches = [run.batch(step) for step in steps]
    for step, batch in zip(steps, batches, strict=True):
        if len(batch) == 0:
            raise ReplayError(f"{run.url}: what step {step} trained is not stored, and steps after it depend on it")
    run.check_stored(np.concatenate(batches))


def _read(
    run: SourceRun, batch: npt.NDArray[np.int64], compared: npt.NDArray[np.int64]
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """The groups of both, each read once."""
    rows: list[int] = np.union1d(batch, compared).tolist()
    groups: Mapping[int, ScoredGroup] = dict(zip(rows, run.read(rows), strict=True))
    return [groups[row] for row in batch.tolist()], [groups[row] for row in compared.tolist()]


def _logprob_error(run: SourceRun, step: int, found: Sequence[npt.NDArray[np.float32]]) -> float | None:
    """Largest difference to the run's stored log π of that step, nats; None if not stored. Raises ReplayError."""
    if not run.logprobs_stored(step):
        return None
    try:
        stored = run.trainer_logprobs(step)
    except PartRemoved:
        return None
    if [len(one) for one in stored] != [len(one) for one in found]:
        raise ReplayError(
            f"{run.url}: with the scores in use step {step} trains {len(found)} trajectories, and it trained "
            f"{len(stored)}; expected the scores that the run trained with"
        )
    return float(max(np.abs(a - b).max() for a, b in zip(stored, found, strict=True)))
