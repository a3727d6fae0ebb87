"""Which checkpoint of a run is the best, as far as its versions were evaluated."""

from collections.abc import Iterable

from millrace.evaluation.results import ResultsReader, best_result
from millrace.training.checkpoints.names import weights_checksum
from storage.checkpoints import Checkpoint
from storage.stores.base import Store


def best_checkpoint(store: Store, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Of `checkpoints`, the one whose weights have the best result; None if none of them was evaluated."""
    stored = {(one.step, weights_checksum(one)): one for one in checkpoints}
    results = [
        result
        for result in ResultsReader(store).read()
        if (result["policy_version"], result.get("weights_checksum")) in stored
    ]
    best = best_result(results)
    return None if best is None else stored[best["policy_version"], best["weights_checksum"]]
