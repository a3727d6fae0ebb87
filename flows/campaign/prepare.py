"""Checks a campaign before it starts, and claims its run.

check   what reads files:       the run ─► model files ─► prompts ─► their lengths
        what takes processes:   teachers ─► reward ─► tokens ─► inputs ─► GPUs ─► vLLM ─► pools ─► store
claim   run.json or attempts/
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from configs.load import changed_defaults, changed_immutably, nearest_preset
from configs.recipe import choose_recipe
from configs.schema import RunConfig
from configs.sources import naming_source
from flows.campaign.inputs import has_model_input, run_inputs
from flows.campaign.mirror import check_mirror
from millrace.doctor.driver import query_gpus
from millrace.errors import InputError, RunExists
from millrace.generation.environments.base import environment_class
from millrace.preflight import model_folder, teacher
from millrace.preflight.child import ask, ask_in_background
from millrace.preflight.memory import (
    check_generator_gpus,
    check_memory,
    check_teacher_memory,
    check_trainer_gpus,
    shared_versions,
)
from millrace.preflight.model import check_training, read_model
from millrace.preflight.model_folder import check_folder_files, check_weight_files
from millrace.preflight.prompts import check_answers, check_prompts, check_texts
from millrace.preflight.vllm import Question as VllmQuestion
from millrace.preflight.vllm import Requests, check_vllm
from millrace.prompts.dataset import PromptSet, load_all_prompts
from millrace.rewards.scorer import make_scorer
from millrace.runs.provenance import Origin
from millrace.runs.record import Attempt, changed_inputs, create_run, latest_attempt, read_run, resume_run
from millrace.runtime.arguments import attempt_config
from millrace.runtime.devices import Process, generator_devices
from storage import layout
from storage.stores.base import Store, probe
from storage.stores.factory import open_store
from tasks.device_leases import leased_devices
from tasks.jobs import jobs, processes_here, stages_here
from tasks.start import warm_up

Resume = Literal["never", "required", "latest"]
"""`never`: the run must not exist yet. `required`: it must, and continues from its latest checkpoint. `latest`: it
continues if it exists, and starts otherwise."""


def check(
    config: RunConfig,
    run_id: str,
    *,
    resume: Resume,
    accept_changed_inputs: bool = False,
    start: Callable[[], object] = lambda: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """Makes every check that changes nothing of a run; returns the content of its inputs, see `flows.campaign.inputs`.

    Hosts of work pools check for themselves what their stages need: GPUs, vLLM, and the model folder if it is not here.
    `start` is called after the checks that only read files, `meanwhile` while another process checks the model folder.
    Raises InputError, BadName or StoreRefused about the first user error, and StageDied if that process, or the check
    of vLLM, crashes.
    """
    store, processes = run_store(config, run_id), processes_here(config)
    here = Counter(stage for stage, _ in processes)
    check_run(store, run_id, resume)
    former = latest_attempt(store) if _continues(store, resume) else None
    if former is not None:
        _check_unchanged(run_id, "another config", changed_immutably(attempt_config(former), config))
    check_mirror(config.mirror)
    model = None
    if here or _has_model(config):
        model = _check_model_files(config, here)
        _check_gpu_memory(config, here)
    prompts, requests = load_all_prompts(config.by_source()), {}
    for name, source in config.by_source().items():
        with naming_source(name):
            if model is not None:
                check_texts(source, model.get("max_position_embeddings"), prompts[name].asked)
    scorer = make_scorer(config.by_source())
    start()
    wait_for_folder = _check_folder(config, warm=stages_here(config)) if model is not None else lambda: None
    _check_teachers(config, here)
    check_user_functions(config)
    rewards = scorer.check()
    for name, source in config.by_source().items():
        with naming_source(name):
            environment_class(source.environment.name)
            check_answers(scorer, name, prompts[name].asked)
            longest = None if model is None else _check_lengths(source, model, prompts[name].asked)
            if (taught_by := source.training.distillation.teacher) is not None:
                num_tokens = (longest or 0) + source.generation.max_new_tokens
                teacher.check_context(taught_by, config.teachers[taught_by].path, num_tokens)
            requests[name] = _vllm_requests(source, prompts[name], longest)
    inputs = run_inputs(config, prompts=prompts, rewards=rewards, has_model=model is not None)
    if former is not None and not accept_changed_inputs:
        expected = "the same, or --accept-changed-inputs (accept_changed_inputs of a deployment)"
        _check_unchanged(run_id, "other inputs", changed_inputs(former, inputs), expected)
    with leased_devices(config, processes, store.url):
        pass
    if "generate" in here and config.generation.engine == "vllm":
        check_vllm(_vllm_question(config, requests, config.generation.replicas))
    if remote_jobs := [job for job in jobs(config) if job.work_pool is not None]:
        # Imported late: only remote jobs need Prefect here.
        from flows.campaign.remote_stages import check_pools

        check_pools(remote_jobs)
    meanwhile()
    wait_for_folder()
    # Last, because it creates the root folder if there is none.
    probe(open_store(config.storage.root))
    return inputs


def check_on_host(config: RunConfig, processes: Iterable[Process], inputs: Mapping[str, str]) -> None:
    """Makes the checks for a work pool's job with these processes, on its host, that the controller could not make.

    `inputs` are those that the controller recorded. Raises InputError as `check` does.
    """
    stages = Counter(stage for stage, _ in processes)
    uses_vllm = "generate" in stages and config.generation.engine == "vllm"
    is_checked = config.model.path is None or has_model_input(inputs, config)
    if is_checked and not uses_vllm:
        _check_gpu_memory(config, stages)
        return
    model = _check_model_files(config, stages)
    _check_gpu_memory(config, stages)
    wait_for_folder = _check_folder(config, warm=())
    prompts, requests = load_all_prompts(config.by_source()), {}
    for name, source in config.by_source().items():
        with naming_source(name):
            requests[name] = _vllm_requests(source, prompts[name], _check_lengths(source, model, prompts[name].asked))
    if uses_vllm:
        check_vllm(_vllm_question(config, requests, replicas=1))
    wait_for_folder()


def _has_model(config: RunConfig) -> bool:
    """Whether this host has the model folder, or makes the model."""
    return config.model.path is None or Path(config.model.path).expanduser().is_dir()


def _check_model_files(config: RunConfig, stages: Counter[str]) -> Mapping[str, Any]:
    """Checks the model by its files for this many processes of each stage; returns the content of its config.json."""
    model = read_model(config.model, choose_recipe(config))
    if config.model.path is not None:
        folder = Path(config.model.path).expanduser()
        check_folder_files(folder, model)
        shapes = check_weight_files(folder, model)
        if "train" in stages or "generate" in stages:
            transport, trains = config.effective_weights.transport, "train" in stages
            versions = shared_versions(transport, trains=trains, generators=stages["generate"])
            check_memory(
                folder,
                shapes,
                config.training if trains else None,
                hosts=config.placement.train.hosts,
                versions=0 if config.sends_adapters else versions,
                dtype=config.generation_dtype,
            )
    check_training(model, config.training)
    return model


def _check_folder(config: RunConfig, warm: Sequence[str]) -> Callable[[], object]:
    """Returns a function that waits for another process to check the model folder, forked once `warm` stages are."""
    if config.model.path is None:
        return lambda: None
    if warm:
        warm_up(warm)
    folder = str(Path(config.model.path).expanduser())
    return ask_in_background(model_folder.MODULE, {"folder": folder}, "the model folder").result


def _check_teachers(config: RunConfig, stages: Collection[str]) -> None:
    """Raises InputError about the first teacher that can't teach the policy, or that these stages' host can't hold."""
    if not config.teachers:
        return
    teachers = {name: each.path for name, each in config.teachers.items()}
    policy = config.model.path if _has_model(config) else None
    question = {"teachers": teachers, "policy": policy and str(Path(policy).expanduser())}
    ask(teacher.MODULE, question, "the teachers")
    if "teach" in stages:
        sizes = [int(size.split()[0]) << 20 for size in query_gpus("memory.total")]
        for each in config.teachers.values():
            path = policy if each.path == teacher.START else each.path
            if path is not None:
                folder = Path(path).expanduser()
                check_teacher_memory(folder, each, config.compute_dtype, min(sizes, default=None))


def _check_gpu_memory(config: RunConfig, stages: Collection[str]) -> None:
    """Checks that the GPUs of this host hold these stages' shares of the model."""
    sizes = [int(size.split()[0]) << 20 for size in query_gpus("memory.total")]
    if config.model.path is None or not sizes:
        return
    folder, generation = Path(config.model.path).expanduser(), config.generation
    if "train" in stages and config.training.device == "cuda":
        check_trainer_gpus(folder, config.training, config.model.dtype, min(sizes))
    if "generate" in stages and generation.engine == "vllm":
        quantized = bool(generation.engine_args.get("quantization"))
        num_gpus = generator_devices(config)
        check_generator_gpus(folder, config.generation_dtype, min(sizes), num_gpus=num_gpus, quantized=quantized)


def _check_lengths(config: RunConfig, model: Mapping[str, Any], prompts: PromptSet) -> int | None:
    """Tokens of the longest of a source's prompts; None if bootstrap has still to make the tokenizer."""
    return check_prompts(
        config.model,
        config.prompts,
        config.environment,
        prompts,
        context=model.get("max_position_embeddings"),
        vocab_size=model.get("vocab_size"),
        ask=ask,
        max_new_tokens=config.generation.max_new_tokens,
    )


def check_user_functions(config: RunConfig, losses: Sequence[str] = ()) -> None:
    """Raises InputError for one of `losses`, by default the configured ones, or an advantage that can't be used.

    Only those named by an import path are tried; the error names the source.
    """
    for name, training in config.trainings().items():
        names = losses or [training.loss.name]
        if any(":" in function for function in (training.advantage, *names)):
            # Imported late: torch is slow to import, and only a user's functions need it here.
            from millrace.training.losses.factory import make_loss
            from millrace.training.samples import make_estimator

            with naming_source(name):
                make_estimator(training.advantage)
                for loss in names:
                    make_loss(training, loss)


def check_run(store: Store, run_id: str, resume: Resume) -> None:
    """Raises RunExists if there is such a run and `resume` is never, and RunMissing if it is required and missing."""
    if resume == "required":
        read_run(store)
    elif resume == "never" and store.exists(layout.RUN):
        raise RunExists(f"run {run_id!r} exists already at {store.url}", expected="another --run-id, or --resume")


def _check_unchanged(run_id: str, what: str, changes: Sequence[str], expected: str | None = None) -> None:
    """Raises InputError if there are changes that forbid to continue the run."""
    if changes:
        raise InputError(f"run {run_id!r} can't be resumed with {what}: {'; '.join(changes)}", expected=expected)


def _vllm_requests(source: RunConfig, prompts: PromptSet, longest: int | None) -> Requests:
    """`longest`: tokens of the longest prompt; None if only vLLM's process can count them."""
    return Requests(
        max_new_tokens=source.generation.max_new_tokens,
        prompts=tuple((prompt.text, prompt.answer) for prompt in prompts.train) if longest is None else (),
        longest_prompt=longest,
        environment=source.environment.name,
    )


def _vllm_question(config: RunConfig, requests: Mapping[str, Requests], replicas: int) -> VllmQuestion:
    """`replicas`: on this host."""
    folder = config.model.path
    samplings = [source.generation for source in config.by_source().values()]
    return VllmQuestion(
        folder=None if folder is None else str(Path(folder).expanduser()),
        tiny=asdict(choose_recipe(config)),
        dtype=config.generation_dtype,
        engine_args=config.generation.engine_args,
        replicas=replicas,
        requests=requests,
        colocated=config.placement.colocated,
        truncates=any(sampling.top_p < 1 or sampling.top_k is not None for sampling in samplings),
        adapters=config.vllm_adapter_arguments,
    )


def claim(
    config: RunConfig,
    run_id: str,
    *,
    resume: Resume,
    inputs: Mapping[str, str],
    flow_run: str | None = None,
    command: str | None = None,
) -> tuple[Store, Attempt]:
    """Creates the run, or adds an attempt to an existing one. Call `check` first, which returns the `inputs`.

    `flow_run` is the address of the attempt's page in the Prefect UI, `command` the command line that continues the
    run. Raises RunExists if the run was created since, and RunMissing without a run to resume.
    """
    store = run_store(config, run_id)
    values = stored_values(config)
    preset, changes = nearest_preset(config)
    defaults = changed_defaults(config)
    origin = Origin(preset=preset, changes=changes, defaults=defaults, flow_run=flow_run, command=command)
    if _continues(store, resume):
        return store, resume_run(store, values, origin, inputs)
    return store, create_run(store, run_id, values, origin, inputs)


def stored_values(config: RunConfig) -> dict[str, Any]:
    """The config as attempts store it: readers see the transport that `auto` stands for."""
    return config.model_copy(update={"weights": config.effective_weights}).model_dump(mode="json")


def run_store(config: RunConfig, run_id: str) -> Store:
    """The store of the run, which need not exist yet. Raises BadName."""
    layout.validate_run_id(run_id)
    root = config.storage.root
    return open_store(root + run_id if root.endswith("/") else f"{root}/{run_id}")


def _continues(store: Store, resume: Resume) -> bool:
    return resume == "required" or (resume == "latest" and store.exists(layout.RUN))
