"""Checks everything about a campaign that can be known to be wrong before it starts, and claims its place.

config, run id ─► names, model, reward, prompts, store, engine ─► run.json and attempts/ ─► Prepared
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from configs.load import changed_immutably, nearest_preset
from configs.recipe import choose_recipe
from configs.schema import RunConfig
from flows.campaign.attempt import handover_folder
from flows.campaign.inputs import run_inputs
from millrace.errors import InputError, RunExists
from millrace.evaluation.examiner import evaluation_sets, with_evaluation_sets
from millrace.generation.environments.base import environment_class
from millrace.preflight import model_folder
from millrace.preflight.model import check_training, read_model
from millrace.preflight.model_folder import check_folder_files, check_weight_files
from millrace.preflight.prompts import check_answers, check_prompts
from millrace.preflight.vllm import Question as VllmQuestion
from millrace.preflight.vllm import check_vllm
from millrace.prompts.dataset import PromptSet, load_prompts
from millrace.rewards.scorer import make_scorer
from millrace.runs.provenance import Origin
from millrace.runs.record import changed_inputs, create_run, latest_attempt, resume_run
from millrace.runtime.arguments import attempt_config
from storage import layout
from storage.stores.base import Store, probe
from storage.stores.factory import open_store
from tasks.jobs import jobs, stages_here
from tasks.questions import Question, ask
from tasks.start import warm_up

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


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A campaign that may be prepared."""

    store: Store
    """The run's."""
    inputs: dict[str, str]
    """What its inputs hold; see `flows.campaign.inputs`."""


def check(
    config: RunConfig,
    run_id: str,
    *,
    resume: Resume,
    accept_changed_inputs: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> Checked:
    """Makes every check that leaves nothing of a run behind.

    `meanwhile` is called while another process looks at the model folder. Raises InputError, BadName or StoreRefused
    with one sentence about the first mistake, and StageDied if that process, or the check of vLLM, crashes.
    """
    store = run_store(config, run_id)
    model = read_model(config.model, choose_recipe(config))
    asked = None if config.model.path is None else _ask_about(Path(config.model.path).expanduser(), model, config)
    check_training(model, config.training, on_this_host=config.placement.train.work_pool is None)
    if ":" in config.training.loss.name + config.training.advantage:
        # Imported late: torch is slow to import, and only functions of one's own need it here.
        from millrace.training.losses.factory import make_loss
        from millrace.training.samples import make_estimator

        make_loss(config.training)
        make_estimator(config.training.advantage)
    further = [one.source for one in config.evaluation.sets.values()]
    scorer = make_scorer(config.scoring, config.prompts, further)
    rewards = scorer.check()
    environment_class(config.environment.name)
    prompts = load_prompts(config.prompts)
    sets = evaluation_sets(config.evaluation, config.prompts, prompts)
    every = with_evaluation_sets(prompts, sets)
    check_answers(scorer, every)
    longest = check_prompts(
        config.model,
        config.prompts,
        config.environment,
        every,
        context=model.get("max_position_embeddings"),
        vocab_size=model.get("vocab_size"),
        ask=ask,
        max_new_tokens=config.generation.max_new_tokens,
    )
    inputs = run_inputs(config, prompts, sets, rewards)
    if _continues(store, resume):
        before = latest_attempt(store)
        if changes := changed_immutably(attempt_config(before), config):
            raise InputError(f"run {run_id!r} can't be resumed with another config: {'; '.join(changes)}")
        if not accept_changed_inputs and (changes := changed_inputs(before, inputs)):
            raise InputError(
                f"run {run_id!r} can't be resumed with other inputs: {'; '.join(changes)}; expected the same, or "
                "--accept-changed-inputs (accept_changed_inputs of a deployment)"
            )
    elif store.exists(layout.RUN):
        raise RunExists(f"run {run_id!r} exists already at {store.url}: choose another --run-id, or add --resume")
    if config.generation.engine == "vllm":
        check_vllm(_question(config, prompts, longest))
    remote = [job for job in jobs(config) if job.work_pool is not None]
    if remote:
        # Imported late: only remote jobs need Prefect here.
        from flows.campaign.remote_stages import check_pools

        check_pools(remote)
    if asked is not None:
        meanwhile()
        asked.answer()
    # Last, because it creates the root folder if there is none.
    probe(open_store(config.storage.root))
    return Checked(store=store, inputs=inputs)


def _ask_about(folder: Path, model: Mapping[str, Any], config: RunConfig) -> Question:
    """Checks the files of a model folder, and has another process look at what transformers makes of it."""
    check_folder_files(folder, model)
    here = stages_here(config)
    check_weight_files(folder, model, loaded_here="train" in here or "generate" in here)
    warm_up(here)
    return Question(model_folder.MODULE, {"folder": str(folder)}, "the model folder")


def prepare(
    config: RunConfig, run_id: str, *, resume: Resume, inputs: Mapping[str, str], flow_run: str | None = None
) -> Prepared:
    """Claims the run's place, or adds an attempt to an existing run. Call `check` first, which returns the `inputs`.

    `flow_run` is the address of the attempt's page in the Prefect UI. Raises RunExists if the place was taken since,
    and RunMissing if there is no run to resume.
    """
    store = run_store(config, run_id)
    values = config.model_dump(mode="json")
    preset, changes = nearest_preset(config)
    origin = Origin(preset=preset, changes=changes, flow_run=flow_run)
    if _continues(store, resume):
        attempt = resume_run(store, values, origin, inputs)
    else:
        attempt = create_run(store, run_id, values, origin, inputs)
    return Prepared(run_url=store.url, attempt=attempt.number, handover=handover_folder(store.url, attempt.number))


def run_store(config: RunConfig, run_id: str) -> Store:
    """Where the run is stored, or will be. Raises BadName."""
    layout.validate_run_id(run_id)
    root = config.storage.root
    return open_store(root + run_id if root.endswith("/") else f"{root}/{run_id}")


def _continues(store: Store, resume: Resume) -> bool:
    return resume == "required" or (resume == "latest" and store.exists(layout.RUN))


def _question(config: RunConfig, prompts: PromptSet, longest: int | None) -> VllmQuestion:
    return VllmQuestion(
        folder=None if config.model.path is None else str(Path(config.model.path).expanduser()),
        tiny=asdict(choose_recipe(config)),
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
