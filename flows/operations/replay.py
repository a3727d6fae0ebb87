"""A replay reads stored runs again, and writes its results to a separate run.

    check ─► run.json, replay.json, start model ─► score anew? ─► verify │ train ─► evaluate │ compare ─► results
                                                               replay/*.json, *.parquet, report.md in the replay's run

Each stage runs in its own process, supervised by a task; score and train are the stages of a campaign. Ctrl-C and
SIGTERM drain them, as in a campaign: the trainer finishes its step and its checkpoint.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from prefect import Task, flow
from prefect.task_runners import ThreadPoolTaskRunner

from configs.load import changed_defaults, with_overrides
from configs.losses import LOSS_NAMES
from configs.recipe import choose_recipe
from configs.requests import ReplayRequest
from configs.schema import RunConfig
from configs.sources import key_in
from configs.stored import AnnotatorPools, stored_top_k_of
from flows.campaign.attempt import arguments_of, attempt_under_way, run_together
from flows.campaign.prepare import check_user_functions
from flows.display.artifacts import artifact_key, show
from flows.operations.replay_results import as_markdown, collect
from millrace.errors import InputError, RunExists
from millrace.preflight.model import check_training, read_model
from millrace.replay.results import write_spec
from millrace.replay.selection import check_same_tokens, plan
from millrace.replay.source_run import SourceRun
from millrace.rewards.scorer import make_scorer
from millrace.runs.provenance import Origin
from millrace.runs.record import create_run, end_attempt
from millrace.runtime.arguments import EVALUATE_AT_END, StageArguments, attempt_config
from storage import layout
from storage.stores.base import Store, probe
from storage.stores.factory import open_store
from tasks.device_leases import leased_devices
from tasks.stages import compare, evaluate, score, train, verify
from tasks.stop import STOP, STOP_NOW

_STAGES: dict[str | None, list[tuple[Task[..., Any], int]]] = {
    None: [],
    "verify": [(verify, 0)],
    "compare": [(compare, 0)],
    "train": [(train, 0), (evaluate, EVALUATE_AT_END)],
}
"""Job → its stages with their replicas, one after the other."""


@flow(
    name="replay",
    flow_run_name="{request.run_id}",
    # Enough for the largest number of scorers that a config allows.
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def replay(request: ReplayRequest) -> dict[str, Any]:
    """Runs the requested replay. Returns its results by name, which its own run stores in `replay/`.

    Args:
        request: Which stored runs, what to do with them, and where the replay's own run is written.

    Raises InputError for a user error before anything has run, and StageDied if a stage can't be kept alive.
    """
    STOP.clear()
    STOP_NOW.clear()
    config = check(request)
    store = _prepare(request, config)
    with attempt_under_way(store, 0, "replay") as (arguments, _):
        if request.rescore is not None:
            _finish(config, arguments, score, range(config.annotators.total("scores")), config.scoring.threads)
        for stage, replica in _STAGES[request.job]:
            _finish(config, arguments, stage, [replica], config.training.num_threads)
        results = collect(store)
        report = as_markdown(results, store)
        store.put(f"{layout.REPLAY_RESULTS}/report.md", report.encode())
        show(report, key=artifact_key(request.run_id, "replay"), description=f"Results from {request.sources[0]}")
        end_attempt(store, 0, "finished")
        return results


def _finish(
    config: RunConfig, arguments: StageArguments, stage: Task[..., Any], replicas: Iterable[int], threads: int
) -> None:
    """Runs these replicas of a stage until all have ended. Ctrl-C and SIGTERM drain them; a second one kills them.

    Raises the error of a stage that failed, and InputError if this host has too few GPUs.
    """
    processes = [(stage.name, replica) for replica in replicas]
    with leased_devices(config, processes, arguments.run_url) as assignment:
        futures = {
            f"{stage.name}-{process[1]}": stage.submit(arguments_of(process, arguments, assignment), threads)
            for process in processes
        }
        run_together(futures.items(), may_end_first=futures.keys())
    STOP.clear()


def check(request: ReplayRequest) -> RunConfig:
    """Checks everything that can be known before anything runs; returns the replay's config.

    Raises InputError, ConfigError, BadName, StoreRefused or StreamCorrupt, each with one sentence.
    """
    layout.validate_run_id(request.run_id)
    _check_request(request)
    runs = [SourceRun(open_store(url)) for url in request.sources]
    check_same_tokens(runs)
    config = _config(request, runs[0])
    _check_teachers(config, runs)
    if request.start_step is not None:
        runs[0].checkpoint(request.start_step)
    if request.job is not None:
        batches = plan(runs, request, groups_per_step=config.training.groups_per_step, seed=config.seed)
        first = request.start_step or 0
        config = _config(request, runs[0], max_steps=first + len(batches))
        max_steps = config.training.max_steps
        if max_steps <= first:
            raise InputError(max_steps, key="training.max_steps", expected=f"more than --start-step, which is {first}")
    model = read_model(config.model, choose_recipe(config))
    if request.job == "train":
        check_training(model, config.training)
    if request.job is not None:
        check_user_functions(config, request.losses or ())
    if request.rescore is not None:
        make_scorer(config.by_source()).check()
    # They run one after the other.
    scorers, trainers = config.annotators.total("scores") if request.rescore else 0, int(request.job == "train")
    for stage, count in (("score", scorers), ("train", trainers)):
        with leased_devices(config, [(stage, replica) for replica in range(count)], request.run_id):
            pass
    store = _own_store(request)
    if store.exists(layout.RUN):
        raise RunExists(f"run {request.run_id!r} exists already", file=store.url, expected="another --run-id")
    probe(open_store(request.root))
    return config


def _check_teachers(config: RunConfig, runs: Sequence[SourceRun]) -> None:
    """Raises InputError unless the runs stored the rows of every teacher that the replay trains with, and its top k."""
    for run in runs:
        stored = AnnotatorPools.of(run.config)
        for source, of_source in config.by_source().items():
            wanted, found = (pools.of_source("teachers", source) for pools in (config.annotators, stored))
            if wanted is not None and wanted != found:
                expected = (
                    f"{'null' if found is None else found.removeprefix('teachers/')}, because {run.url} stored that"
                )
                key = key_in(source, "training.distillation.teacher")
                raise InputError(wanted.removeprefix("teachers/"), key=key, expected=expected)
            top_k, stored_top_k = of_source.training.distillation.top_k, stored_top_k_of(run.config, source)
            if wanted is not None and (top_k or 0) > stored_top_k:
                expected = f"at most {stored_top_k}, which {run.url} stored" if stored_top_k else "null, as in the run"
                raise InputError(top_k, key=key_in(source, "training.distillation.top_k"), expected=expected)


def _check_request(request: ReplayRequest) -> None:
    job = f"--{request.job}"
    if request.job is None and request.rescore is None:
        raise InputError("nothing to do", expected="--verify, --train, --rescore NAME or --compare LOSS,LOSS")
    if request.rescore is not None and request.job in ("verify", "compare"):
        raise InputError("given", key="--rescore", expected=f"none with {job}, which uses the run's own rewards")
    if len(request.sources) > 1 and (request.job != "train" or request.rescore is not None):
        raise InputError(f"{len(request.sources)} stored runs", expected="one: only --train takes several")
    if request.job == "compare":
        unknown = [name for name in request.losses if name not in LOSS_NAMES and ":" not in name]
        if unknown or len(set(request.losses)) < 2:
            names = f"two or more of {', '.join(LOSS_NAMES)} or package.module:function, joined by commas"
            raise InputError(",".join(request.losses), key="--compare", expected=names)
    if request.job != "train":
        # Every job is supervised; no other setting may change where nothing is made anew.
        settings = [setting for setting in request.settings if not setting.startswith("supervision.")]
        for option, is_given in (
            ("--order", request.order != "stored"),
            ("--dropped", request.dropped),
            ("--start-step", request.start_step is not None),
            (f"--set {' '.join(settings)}", bool(settings) and request.rescore is None),
        ):
            if is_given:
                raise InputError("given", key=option, expected="--train with it, the only job that uses it")


def _config(request: ReplayRequest, source: SourceRun, max_steps: int | None = None) -> RunConfig:
    """The source's config with the request's changes; `max_steps`, from the plan, is an upper bound."""
    stored = attempt_config(source.attempt).model_dump(mode="json")
    # A replay trains on this host, wherever the run's trainer was.
    stored["placement"]["train"] = {}
    settings = list(request.settings)
    if request.rescore is not None:
        # A setting may give a source another reward than the others.
        of_sources = [f"sources.{name}.scoring.reward={request.rescore}" for name in stored["sources"]]
        settings = [*of_sources, *settings, f"scoring.reward={request.rescore}"]
    config = with_overrides(stored, settings, where=source.url)
    if max_steps is None:
        return config
    if any(setting.startswith("training.max_steps=") for setting in settings):
        max_steps = min(config.training.max_steps, max_steps)
    return with_overrides(stored, [*settings, f"training.max_steps={max_steps}"], where=source.url)


def _prepare(request: ReplayRequest, config: RunConfig) -> Store:
    """Creates the replay's run, and returns its store."""
    store = _own_store(request)
    create_run(store, request.run_id, config.model_dump(mode="json"), Origin(defaults=changed_defaults(config)))
    sources = [open_store(url) for url in request.sources]
    write_spec(store, request.model_copy(update={"sources": [source.url for source in sources]}))
    if config.model.path is None:
        # The manifest goes last: it makes the start model complete.
        for path in (*sources[0].list(layout.START_MODEL), layout.START_MANIFEST):
            store.put_if_absent(path, bytes(sources[0].get(path)))
    return store


def _own_store(request: ReplayRequest) -> Store:
    return open_store(f"{request.root.removesuffix('/')}/{request.run_id}")
