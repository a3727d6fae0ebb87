"""The batches of a replay: what its spec chooses of each stored run, in the order of the plan."""

from collections.abc import Sequence

from configs.schema import RunConfig
from millrace.errors import ReplayError
from millrace.replay.plan import Batch, plan
from millrace.replay.selection import select
from millrace.replay.spec import ReplaySpec
from millrace.replay.stored import StoredRun
from millrace.start_hashes import read_start_hashes


def planned(runs: Sequence[StoredRun], spec: ReplaySpec, config: RunConfig) -> Sequence[Batch]:
    """At least one batch; the same ones whenever it is asked. Raises ReplayError where nothing is left to train on."""
    chosen = [(run, select(run, spec.selection), source.share) for run, source in zip(runs, spec.sources, strict=True)]
    batches = plan(
        chosen,
        groups_per_step=config.training.groups_per_step,
        order=spec.order,
        seed=config.seed,
        max_steps=None,
    )
    if not batches:
        found = sum(len(rows) for _, rows, _ in chosen)
        raise ReplayError(
            f"{found} stored groups are chosen and training.groups_per_step is {config.training.groups_per_step}; "
            "expected at least one whole batch"
        )
    return batches


def check_alike(runs: Sequence[StoredRun]) -> None:
    """Raises ReplayError where stored runs speak in different tokens: then their trajectories do not mix."""
    first, *others = runs
    for other in others:
        if other.vocab_size != first.vocab_size:
            raise ReplayError(
                f"{other.url}: its vocabulary has {other.vocab_size} tokens, but that of {first.url} has "
                f"{first.vocab_size}; expected one vocabulary"
            )
        if _tokenizer(other) != _tokenizer(first):
            raise ReplayError(f"{other.url}: its tokenizer is another than that of {first.url}; expected the same one")


def _tokenizer(run: StoredRun) -> str | None:
    """What tells it from others: its file's hash, or the folder that the run was started from."""
    path: str | None = run.config["model"]["path"]
    return (read_start_hashes(run.store) or {}).get("tokenizer.json", path)
