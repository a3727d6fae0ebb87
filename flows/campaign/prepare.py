"""Checks everything about a campaign that can be known to be wrong before it starts, and claims its place.

config, run id ─► names, model, reward, prompts, store, engine ─► run.json and attempts/ ─► Prepared
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.load import changed_immutably
from configs.schema import RunConfig
from flows.campaign.handover import handover_folder
from millrace.errors import InputError, RunExists
from millrace.evaluation.sets import all_asked, evaluation_sets
from millrace.generation.environments.factory import environment_class
from millrace.preflight.model import check_training, read_model
from millrace.preflight.prompts import check_prompts
from millrace.preflight.vllm import Question, check_vllm
from millrace.prompts.dataset import PromptSet, load_prompts
from millrace.rewards.scorer import make_scorer
from millrace.runs.record import create_run, latest_attempt, resume_run
from storage import layout
from storage.stores.base import Store, probe
from storage.stores.factory import open_store
from tasks.jobs import jobs

Resume = Literal["never", "required", "latest"]
"""`never`: the run must not exist yet. `required`: it must, and continues from its latest checkpoint. `latest`: it
continues if it exists, and starts otherwise."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that may start."""

    run_url: str
    attempt: int
    handover: Path
    """Folder in shared memory where this attempt's weights pass from process to process."""


def check(config: RunConfig, run_id: str, *, resume: Resume) -> Store:
    """Returns the run's store after every check that leaves nothing of a run behind.

    Raises InputError, BadName or StoreRefused with one sentence about the first mistake, and StageDied if vLLM is
    configured and its check crashes.
    """
    layout.validate_run_id(run_id)
    model = read_model(config.model)
    check_training(model, config.training, on_this_host=config.placement.train.work_pool is None)
    make_scorer(config.scoring, config.prompts, [one.source for one in config.evaluation.sets.values()]).check()
    environment_class(config.environment.name)
    prompts = load_prompts(config.prompts)
    longest = check_prompts(
        config.model,
        config.prompts,
        config.environment,
        all_asked(prompts, evaluation_sets(config.evaluation, config.prompts, prompts)),
        context=model.get("max_position_embeddings"),
        max_new_tokens=config.generation.max_new_tokens,
    )
    store = _run_store(config, run_id)
    if _continues(store, resume):
        changes = changed_immutably(RunConfig.model_validate(latest_attempt(store).config), config)
        if changes:
            raise InputError(f"run {run_id!r} can't be resumed with another config: {'; '.join(changes)}")
    elif store.exists(layout.RUN):
        raise RunExists(f"run {run_id!r} exists already at {store.url}: choose another --run-id, or add --resume")
    if config.generation.engine == "vllm":
        check_vllm(_question(config, prompts, longest))
    remote = [job for job in jobs(config) if job.work_pool is not None]
    if remote:
        # Imported late: only remote jobs need Prefect here.
        from flows.campaign.work_pools import check_pools

        check_pools(remote)
    # Last, because it creates the root folder if there is none.
    probe(open_store(config.storage.root))
    return store


def prepare(config: RunConfig, run_id: str, *, resume: Resume) -> Prepared:
    """Claims the run's place, or adds an attempt to an existing run. Call `check` first.

    Raises RunExists if the place was taken since, and RunMissing if there is no run to resume.
    """
    store = _run_store(config, run_id)
    values = config.model_dump(mode="json")
    attempt = resume_run(store, values) if _continues(store, resume) else create_run(store, run_id, values)
    return Prepared(run_url=store.url, attempt=attempt.number, handover=handover_folder(store.url, attempt.number))


def _run_store(config: RunConfig, run_id: str) -> Store:
    root = config.storage.root
    return open_store(root + run_id if root.endswith("/") else f"{root}/{run_id}")


def _continues(store: Store, resume: Resume) -> bool:
    return resume == "required" or (resume == "latest" and store.exists(layout.RUN))


def _question(config: RunConfig, prompts: PromptSet, longest: int | None) -> Question:
    return Question(
        folder=None if config.model.path is None else str(Path(config.model.path).expanduser()),
        tiny=config.model.bootstrap.model_dump(),
        dtype=config.generation_dtype,
        engine_args=config.generation.engine_args,
        replicas=config.generation.replicas,
        max_new_tokens=config.generation.max_new_tokens,
        environment=config.environment.name,
        colocated=config.placement.colocated,
        truncates=config.generation.top_p < 1 or config.generation.top_k is not None,
        prompts=tuple((prompt.text, prompt.answer) for prompt in prompts.train) if longest is None else (),
        longest_prompt=longest,
    )
