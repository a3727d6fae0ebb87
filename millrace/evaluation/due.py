"""Which checkpoint is evaluated next.

    checkpoints   0 │ 10 │ 20 │ 30 │ 40 │ 50 │ 60        every = 20
                         done           due       due    60 is evaluated next, and 40 is skipped

Evaluation takes what time the processor has left, and may fall behind. The newest due version then says more than the
oldest one.
"""

from collections.abc import Callable, Iterable

from storage.checkpoints import Checkpoint


def due(newest_first: Iterable[Checkpoint], every: int, is_done: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
    """The checkpoints to evaluate, newest first: of a multiple of `every` versions, and newer than any that is done.

    `newest_first` are the checkpoints in the log, those that were rolled back included, which are never due.
    """
    found: list[Checkpoint] = []
    lowest: int | None = None
    for checkpoint in newest_first:
        # A trainer starts from the newest: earlier records of the same or a later step were rolled back.
        if lowest is not None and checkpoint.step >= lowest:
            continue
        lowest = checkpoint.step
        if lowest == 0 or lowest % every:
            continue
        if is_done(checkpoint):
            break
        found.append(checkpoint)
    return found
