"""Checks a replay before it starts, and creates the run it writes to.

request ─► sources: stored enough? one vocabulary? ─► config ─► selection, plan: anything left? ─► run.json, replay.json
"""

from dataclasses import dataclass
from pathlib import Path

from configs.load import with_overrides
from configs.losses import LOSS_NAMES
from configs.recipe import choose_recipe
from configs.requests import ReplayRequest
from configs.schema import RunConfig
from flows.campaign.attempt import handover_folder
from millrace.errors import InputError, RunExists
from millrace.preflight.model import check_training, read_model
from millrace.replay.results import write_spec
from millrace.replay.selection import check_same_tokens, plan
from millrace.replay.source_run import SourceRun
from millrace.rewards.scorer import make_scorer
from millrace.runs.attempt_config import attempt_config
from millrace.runs.record import create_run
from storage import layout
from storage.stores.base import Store, probe
from storage.stores.factory import open_store


@dataclass(frozen=True, kw_only=True)
class PreparedReplay:
    """A replay whose own run exists."""

    store: Store
    """The replay's own run."""
    config: RunConfig
    handover: Path
    """Folder in shared memory for its stages."""


def prepare(request: ReplayRequest) -> PreparedReplay:
    """Checks the request, then creates the replay's run. Raises as `check` does."""
    config = check(request)
    store = _own_store(request)
    create_run(store, request.run_id, config.model_dump(mode="json"))
    sources = [open_store(url) for url in request.sources]
    write_spec(store, request.model_copy(update={"sources": [source.url for source in sources]}))
    if config.model.path is None:
        for path in sources[0].list(layout.START_MODEL):
            store.put_if_absent(path, bytes(sources[0].get(path)))
        # The manifest goes last: without it there is no start model.
        store.put_if_absent(layout.START_MANIFEST, bytes(sources[0].get(layout.START_MANIFEST)))
    return PreparedReplay(store=store, config=config, handover=handover_folder(store.url, 0))


def check(request: ReplayRequest) -> RunConfig:
    """Checks everything that can be known before anything runs; returns the replay's config.

    Raises InputError, ConfigError, BadName, StoreRefused or StreamCorrupt, each with one sentence.
    """
    layout.validate_run_id(request.run_id)
    _check_request(request)
    runs = [SourceRun(open_store(url)) for url in request.sources]
    check_same_tokens(runs)
    config = _config(request, runs[0])
    if request.start_step is not None:
        runs[0].checkpoint(request.start_step)
    if request.job is not None:
        batches = plan(runs, request, groups_per_step=config.training.groups_per_step, seed=config.seed)
        first = request.start_step or 0
        config = _config(request, runs[0], max_steps=first + len(batches))
        if config.training.max_steps <= first:
            raise InputError(
                f"training.max_steps is {config.training.max_steps} and --start-step is {first}; "
                "expected a larger training.max_steps"
            )
    model = read_model(config.model, choose_recipe(config))
    if request.job == "train":
        check_training(model, config.training, on_this_host=True)
    own = [name for name in (config.training.loss.name, config.training.advantage, *request.losses) if ":" in name]
    if own and request.job is not None:
        # Imported late: torch is slow to import, and only functions of one's own need it here.
        from millrace.training.losses.factory import make_loss
        from millrace.training.samples import make_estimator

        make_estimator(config.training.advantage)
        for loss in request.losses or [config.training.loss.name]:
            make_loss(config.training, loss)
    if request.rescore is not None:
        make_scorer(config.scoring, config.prompts).check()
    store = _own_store(request)
    if store.exists(layout.RUN):
        raise RunExists(f"run {request.run_id!r} exists already at {store.url}: choose another --run-id")
    probe(open_store(request.root))
    return config


def _own_store(request: ReplayRequest) -> Store:
    return open_store(f"{request.root.removesuffix('/')}/{request.run_id}")


def _check_request(request: ReplayRequest) -> None:
    if request.job is None and request.rescore is None:
        raise InputError("nothing to do: expected one of --verify, --train, --rescore NAME and --compare LOSS,LOSS")
    if request.rescore is not None and request.job in ("verify", "compare"):
        raise InputError(f"--rescore is given with --{request.job}, which uses the run's own rewards")
    if len(request.sources) > 1 and (request.job != "train" or request.rescore is not None):
        raise InputError(f"{len(request.sources)} stored runs were given; expected one: only --train takes several")
    if request.job == "compare":
        unknown = [name for name in request.losses if name not in LOSS_NAMES and ":" not in name]
        if unknown or len(set(request.losses)) < 2:
            raise InputError(
                f"--compare {','.join(request.losses)}: expected two or more of {', '.join(LOSS_NAMES)} "
                "or package.module:function, joined by commas"
            )
    if request.job != "train":
        # Every job is supervised; nothing else of the config may change where nothing is made anew.
        others = [one for one in request.settings if not one.startswith("supervision.")]
        for name, given in (
            ("--order", request.order != "stored"),
            ("--dropped", request.dropped),
            ("--start-step", request.start_step is not None),
            (f"--set {' '.join(others)}", bool(others) and request.rescore is None),
        ):
            if given:
                raise InputError(f"{name} is given without --train, the only job that uses it")


def _config(request: ReplayRequest, source: SourceRun, max_steps: int | None = None) -> RunConfig:
    """The source's config with the request's changes; `max_steps`, from the plan, is an upper bound."""
    stored = attempt_config(source.attempt).model_dump(mode="json")
    # A replay trains on this host, wherever the run's trainer was.
    stored["placement"]["train"] = {}
    settings = list(request.settings)
    if request.rescore is not None:
        settings.append(f"scoring.reward={request.rescore}")
    config = with_overrides(stored, settings, where=source.url)
    if max_steps is None:
        return config
    if any(setting.startswith("training.max_steps=") for setting in settings):
        max_steps = min(config.training.max_steps, max_steps)
    return with_overrides(stored, [*settings, f"training.max_steps={max_steps}"], where=source.url)
