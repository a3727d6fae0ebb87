"""Everything a campaign can know to be wrong before it starts, and the place it starts in.

config, run id ─► names, model folder, prompts, reward, engine, store ─► run.json and attempts/ ─► Prepared
"""

import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.load import changed_immutably
from configs.schema import RunConfig
from millrace.engines.vllm_check import Question, refusal
from millrace.environments.factory import environment_class
from millrace.errors import InputError, RunExists
from millrace.model_folder import check_model_folder
from millrace.packages import check_installed
from millrace.parallel.layout import check_layout
from millrace.places import places
from millrace.prompts import PromptSet
from millrace.run import create_run, latest_attempt, resume_run
from millrace.stages.inputs import load_prompt_set
from millrace.stages.scoring import make_scorer
from millrace.trainable import check_trainable
from storage import layout
from storage.factory import open_store
from storage.memory import memory_folder
from storage.store import Store, probe

Resume = Literal["never", "required", "latest"]
"""`never`: the run must not exist yet. `required`: it must, and goes on from its latest checkpoint. `latest`: it goes
on where it exists, and starts where it does not."""

_accepted: list[Question] = []
"""What vLLM could start with, as far as this process has asked."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that may start."""

    run_url: str
    attempt: int
    handover: Path
    """Folder in shared memory where this attempt's weights pass from process to process."""


def check(config: RunConfig, run_id: str, *, resume: Resume) -> Store:
    """The store at the run's place, after every look that leaves no half-made run behind.

    Raises InputError, BadName or StoreRefused with one sentence about the first mistake found, and StageDied where vLLM
    is asked for and does not even come to refuse.
    """
    layout.validate_run_id(run_id)
    check_model(config)
    make_scorer(config).check()
    environment_class(config.environment.name)
    prompts = load_prompt_set(config)
    root = config.storage.root
    store = open_store(root + run_id if root.endswith("/") else f"{root}/{run_id}")
    if _goes_on(store, resume):
        changes = changed_immutably(RunConfig.model_validate(latest_attempt(store).config), config)
        if changes:
            raise InputError(f"run {run_id!r} can't be resumed with another config: {'; '.join(changes)}")
    elif store.exists(layout.RUN):
        raise RunExists(f"run {run_id!r} exists already at {store.url}: choose another --run-id, or add --resume")
    if config.generation.engine == "vllm":
        _check_vllm(config, prompts)
    if any(place.work_pool for place in places(config)):
        # Late: only what is placed needs Prefect by now.
        from flows.pools import check_pools

        check_pools(places(config))
    # Last, for it makes the root folder where there is none yet.
    probe(open_store(config.storage.root))
    return store


def check_model(config: RunConfig, *, trains: bool = True) -> None:
    """Looks at the model's folder, where it has one, and, if a trainer is to start, at whether model and host allow
    its layout; on another host the stage itself looks at the GPUs.

    Raises InputError with one sentence.
    """
    if config.model.path is not None:
        model = check_model_folder(Path(config.model.path).expanduser())
    else:
        shape = config.model.bootstrap
        model = {
            "model_type": "llama",
            "num_attention_heads": shape.num_heads,
            "intermediate_size": shape.intermediate_size,
        }
    if not trains:
        return
    check_trainable(model)
    training, gpus = config.training, None
    if training.device == "cuda" and config.placement.train.work_pool is None:
        # Late: only who has GPUs need wait for torch.
        import torch

        gpus = torch.cuda.device_count()
    check_layout(model, training.parallel, gpus=gpus)
    if training.lora.rank is not None:
        check_installed("peft", "lora", f"training.lora.rank is {training.lora.rank}")


def prepare(config: RunConfig, run_id: str, *, resume: Resume) -> Prepared:
    """Checks, then claims the run's place, or adds an attempt to the run that is there."""
    store = check(config, run_id, resume=resume)
    values = config.model_dump(mode="json")
    attempt = resume_run(store, values) if _goes_on(store, resume) else create_run(store, run_id, values)
    return Prepared(run_url=store.url, attempt=attempt.number, handover=handover_folder(store.url))


def _goes_on(store: Store, resume: Resume) -> bool:
    return resume == "required" or (resume == "latest" and store.exists(layout.RUN))


def _check_vllm(config: RunConfig, prompts: PromptSet) -> None:
    question = Question(
        folder=None if config.model.path is None else str(Path(config.model.path).expanduser()),
        tiny=config.model.bootstrap.model_dump(exclude={"threads"}),
        dtype=config.generation_dtype,
        engine_args=config.generation.engine_args,
        replicas=config.generation.replicas,
        max_new_tokens=config.generation.max_new_tokens,
        environment=config.environment.name,
        colocated=config.placement.colocated,
        prompts=tuple((prompt.text, prompt.answer) for prompt in prompts.train),
    )
    # A campaign at a terminal is checked before its flow starts, and by its flow again.
    if question in _accepted:
        return
    print("checking generation.engine_args with vLLM …", flush=True)
    started = time.monotonic()
    sentence = refusal(question)
    if sentence is not None:
        raise InputError(sentence)
    print(f"vLLM takes them, after {time.monotonic() - started:.0f} s", flush=True)
    _accepted.append(question)


def handover_folder(user: str) -> Path:
    """A fresh folder in memory.

    Its name follows from its user's, such as the run's URL: what a killed one left behind goes when there is a next.
    """
    folder = memory_folder() / f"handover-{hashlib.sha256(user.encode()).hexdigest()[:16]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder
