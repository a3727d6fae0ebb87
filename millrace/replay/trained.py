"""How well and how fast a run has trained: the numbers by which a replay stands beside the run it replays."""

from dataclasses import dataclass

from millrace.history import read_steps, throughput
from millrace.status import StatusReader
from storage.progress import read_life
from storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run's trainer, from its first step to its last."""

    run_id: str
    steps: int
    """Policy version that it came to."""
    accuracy: float | None
    """Held-out greedy accuracy of its newest measured version above 0; None where none was."""
    tokens_per_second: float | None
    """Response tokens trained per second, waiting included; None with fewer than two steps."""
    train_share: float | None
    """Share of the trainer's time that its optimizer steps took; the rest is reading, waiting, handing over."""
    seconds: dict[str, float]
    """What its time went into."""


def trained(store: Store) -> Trained:
    """Of the run in `store`. Raises RunMissing, and StreamCorrupt where it is damaged."""
    status = StatusReader(store).look()
    steps = read_steps(store)
    seconds: dict[str, float] = dict(read_life(store, "train", 0).get("seconds", {}))
    total = sum(seconds.values())
    end = status["eval"].get("end")
    return Trained(
        run_id=status["run_id"],
        steps=steps[-1].policy_version if steps else 0,
        accuracy=None if end is None else end["accuracy"],
        tokens_per_second=next((value for _, value in throughput(steps, 1)), None),
        train_share=seconds.get("train", 0.0) / total if total else None,
        seconds=seconds,
    )
