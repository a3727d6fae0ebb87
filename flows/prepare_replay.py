"""Everything a replay can know to be wrong before it starts, and the run it publishes into.

request ─► sources: stored enough? one vocabulary? ─► config ─► selection, plan: anything left? ─► run.json, replay.json
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from configs.load import with_overrides
from configs.replay import ReplayRequest
from configs.schema import RunConfig
from configs.training import LossName
from flows.prepare import check_model, handover_folder
from millrace.errors import InputError, RunExists
from millrace.replay.batches import check_alike, planned
from millrace.replay.selection import Selection
from millrace.replay.spec import ReplaySpec, Source, write_spec
from millrace.replay.stored import StoredRun
from millrace.run import create_run
from millrace.stages.scoring import make_scorer
from storage import layout
from storage.factory import open_store
from storage.store import Store, probe


@dataclass(frozen=True, kw_only=True)
class PreparedReplay:
    """A replay that may start."""

    run_url: str
    config: RunConfig
    handover: Path
    """Folder in shared memory for what its stages keep there."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A replay that could start, of which nothing has been made yet."""

    store: Store
    """Where its own run will lie."""
    source: StoredRun
    """The first of its stored runs."""
    spec: ReplaySpec
    config: RunConfig


def prepare(request: ReplayRequest) -> PreparedReplay:
    """Checks, then makes the replay's run. Raises as `check` does."""
    checked = check(request)
    store = checked.store
    create_run(store, request.run_id, checked.config.model_dump(mode="json"))
    write_spec(store, checked.spec)
    if checked.config.model.path is None:
        _copy_start_model(checked.source.store, store)
    return PreparedReplay(run_url=store.url, config=checked.config, handover=handover_folder(store.url))


def check(request: ReplayRequest) -> Checked:
    """Looks at all that can be known to be wrong before anything runs.

    Raises InputError, ConfigError, BadName, StoreRefused or StreamCorrupt with one sentence about the first mistake.
    """
    layout.validate_run_id(request.run_id)
    _check_request(request)
    runs = [StoredRun(open_store(url)) for url in request.sources]
    check_alike(runs)
    spec = _spec(request)
    config = _config(request, runs[0])
    if request.start_step is not None:
        runs[0].checkpoint(request.start_step)
    if spec.job is not None:
        steps = len(planned(runs, spec, config))
        first = request.start_step or 0
        config = _config(request, runs[0], max_steps=first + steps)
        if config.training.max_steps <= first:
            raise InputError(
                f"training.max_steps is {config.training.max_steps} and --start-step is {first}; "
                "expected more steps than there are before it begins"
            )
    check_model(config, trains=request.job == "train")
    if request.rescore is not None:
        make_scorer(config).check()
    store = open_store(f"{request.root.removesuffix('/')}/{request.run_id}")
    if store.exists(layout.RUN):
        raise RunExists(f"run {request.run_id!r} exists already at {store.url}: choose another --run-id")
    probe(open_store(request.root))
    return Checked(store=store, source=runs[0], spec=spec, config=config)


def _check_request(request: ReplayRequest) -> None:
    if request.job is None and request.rescore is None:
        raise InputError("nothing to do: expected one of --verify, --train, --rescore NAME and --compare LOSS,LOSS")
    if request.rescore is not None and request.job in ("verify", "compare"):
        raise InputError(f"--rescore is given with --{request.job}, which takes the rewards that the run trained with")
    if len(request.sources) > 1 and (request.job != "train" or request.rescore is not None):
        raise InputError(f"{len(request.sources)} stored runs were given; expected one, for only --train mixes several")
    if request.shares and len(request.shares) != len(request.sources):
        raise InputError(f"{len(request.shares)} shares for {len(request.sources)} stored runs; expected one for each")
    if request.job == "compare":
        known = get_args(LossName)
        unknown = [name for name in request.losses if name not in known]
        if unknown or len(set(request.losses)) < 2:
            raise InputError(
                f"--compare {','.join(request.losses)}: expected two or more of {', '.join(known)}, joined by commas"
            )
    if request.job != "train":
        for name, given in (
            ("--order", request.order != "stored"),
            ("--dropped", request.dropped),
            ("--start-step", request.start_step is not None),
            ("--set", bool(request.settings) and request.rescore is None),
        ):
            if given:
                raise InputError(f"{name} is given without --train, which alone heeds it")


def _spec(request: ReplayRequest) -> ReplaySpec:
    shares: Sequence[float] = request.shares or [1.0] * len(request.sources)
    return ReplaySpec(
        sources=tuple(
            Source(url=open_store(url).url, share=share) for url, share in zip(request.sources, shares, strict=True)
        ),
        job=request.job,
        rescore=request.rescore is not None,
        selection=Selection(
            from_step=request.from_step,
            to_step=request.to_step,
            where=request.where,
            max_staleness=request.max_staleness,
            dropped=request.dropped,
        ),
        order=request.order,
        start_step=request.start_step,
        tolerance=request.tolerance,
        losses=tuple(request.losses),
        own_copies=request.own_copies,
    )


def _config(request: ReplayRequest, source: StoredRun, max_steps: int | None = None) -> RunConfig:
    """The source's, with what the request changes; `max_steps` where the plan decides it."""
    values: dict[str, Any] = dict(source.config)
    settings = list(request.settings)
    if request.rescore is not None:
        settings.append(f"scoring.reward={request.rescore}")
    if max_steps is not None:
        asked = with_overrides(_copied(values), settings, where=source.url).training.max_steps
        given = any(setting.startswith("training.max_steps=") for setting in settings)
        settings.append(f"training.max_steps={min(asked, max_steps) if given else max_steps}")
    return with_overrides(_copied(values), settings, where=source.url)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return RunConfig.model_validate(values).model_dump(mode="json")


def _copy_start_model(source: Store, store: Store) -> None:
    for path in source.list(layout.START_MODEL):
        store.put_if_absent(path, bytes(source.get(path)))
    # Last: without it there is no start model.
    store.put_if_absent(layout.START_MANIFEST, bytes(source.get(layout.START_MANIFEST)))
