"""Which stored version of a run is the best, as far as its versions were evaluated."""

from collections.abc import Iterable

from millrace.evaluation.results import Result, ResultsReader, best_result
from millrace.training.checkpoints.names import weights_checksum
from storage.checkpoints import Checkpoint
from storage.stores.base import Store


def best_version(store: Store, checkpoints: Iterable[Checkpoint]) -> int | None:
    """The best policy version among `checkpoints` and the base model, 0; None if none of them was evaluated."""
    best = best_result(_stored_results(store, checkpoints))
    return None if best is None else int(best["policy_version"])


def best_checkpoint(store: Store, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Of `checkpoints`, the one whose weights have the best result; None if none of them was evaluated."""
    stored = {(one.step, weights_checksum(one)): one for one in checkpoints}
    results = _stored_results(store, stored.values())
    best = best_result([result for result in results if result["policy_version"] > 0])
    return None if best is None else stored[best["policy_version"], best["weights_checksum"]]


def _stored_results(store: Store, checkpoints: Iterable[Checkpoint]) -> list[Result]:
    """The results of the base model and of these checkpoints, in order of versions."""
    stored = {(one.step, weights_checksum(one)) for one in checkpoints}
    return [
        result
        for result in ResultsReader(store).read()
        if result["policy_version"] == 0 or (result["policy_version"], result.get("weights_checksum")) in stored
    ]
