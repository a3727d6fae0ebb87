"""CPU threads of trainer and generators where the config leaves them open: the cores of this host, divided.

    busy seconds × threads in an earlier attempt ─┬─► work of trainer and generators ─► cores ─► threads of each process
    none yet: half each ──────────────────────────┘
    they take turns, as in sync mode: all cores for each

The choice becomes part of the attempt's config, so that a replay computes with as many threads, bit for bit.
"""

import math
import os
from pathlib import Path

from configs.schema import RunConfig
from millrace.preflight.model_folder import read_shapes
from millrace.runs.record import latest_attempt
from millrace.runs.status import stage_seconds
from storage import layout
from storage.progress import read_progress
from storage.stores.base import Store

FEWEST_PARAMETERS = 20_000_000
"""The threads of smaller models mostly wait for each other."""


def with_threads(config: RunConfig, store: Store, cores: int | None = None) -> RunConfig:
    """Returns `config` with `training.threads` and `generation.threads` chosen where they are null.

    `store` is the run's, which need not exist yet. `cores`: those of this host that this process may use, by default.
    Raises StreamCorrupt.
    """
    training, generation = config.training, config.generation
    num_train = num_generate = 1
    if _shares_cores(config):
        cores = cores or len(os.sched_getaffinity(0))
        ranks = training.parallel.data * training.parallel.tensor
        takes_turns = config.pipeline.mode == "sync" or config.placement.colocated
        if takes_turns:
            for_train = cores
        elif generation.threads is None:
            for_train = min(round(cores * _share_of_trainer(store)), cores - generation.replicas)
        else:
            for_train = cores - generation.threads * generation.replicas
        num_train = training.threads or max(1, for_train // ranks)
        for_generate = cores if takes_turns else cores - num_train * ranks
        num_generate = max(1, for_generate // generation.replicas)
    sections = {
        "training": training.model_copy(update={"threads": training.threads or num_train}),
        "generation": generation.model_copy(update={"threads": generation.threads or num_generate}),
    }
    return config.model_copy(update=sections)


def _shares_cores(config: RunConfig) -> bool:
    """Whether trainer and generators compute on this host's cores, and gain by several threads."""
    placement, path = config.placement, config.model.path
    elsewhere = placement.train.work_pool or placement.generate.work_pool or placement.train.hosts > 1
    if path is None or elsewhere or config.training.device != "cpu":
        return False
    return sum(map(math.prod, read_shapes(Path(path)).values())) >= FEWEST_PARAMETERS


def _share_of_trainer(store: Store) -> float:
    """The trainer's share of the core-seconds that it and the generators were busy in the newest attempt."""
    if not store.exists(layout.RUN):
        return 0.5
    config, seconds = latest_attempt(store).config, stage_seconds(read_progress(store))
    train, generate = (
        seconds[stage] * (config[section]["threads"] or 1)
        for stage, section in (("train", "training"), ("generate", "generation"))
    )
    return train / (train + generate) if train and generate else 0.5
