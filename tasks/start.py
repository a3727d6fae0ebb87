"""Starts a stage process, according to its run's config.

stage ──► forked by the fork server       ready at once
      └─► started as a command            where it can't be forked: vLLM, several ranks, another platform
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from configs.operation import LIVE
from configs.schema import RunConfig
from millrace.forking.stages import STAGES, Process, start_command
from millrace.runtime.arguments import Hosts, StageArguments
from millrace.runtime.heartbeat import interface_variables
from storage.stores.base import Store

_JOIN_SECONDS = 30.0
"""How long a trainer over several hosts waits for missing ones before it continues with `min_hosts`."""


def warm_up(stages: Iterable[str]) -> None:
    """Starts this process's fork server, which imports the packages of these stages, unless it runs already."""
    STAGES.warm_up([_module(stage) for stage in stages])


def start_stage(
    stage: str,
    arguments: StageArguments,
    config: RunConfig,
    stderr: IO[bytes],
    threads: int,
    warn: Callable[[str], None],
) -> Process:
    """Forks the stage process where it can be forked, and otherwise starts a command, which `warn` gets a line about.

    Raises StageDied if the fork server keeps dying, and InputError if this host is not in `placement.train.network`.
    """
    program = ["-m", _module(stage), *arguments.as_argv()]
    parallel, where = config.training.parallel, config.placement.train
    environment = arguments.environment
    if stage == "train" or (stage == "generate" and config.effective_weights.transport in LIVE):
        # They meet in one communicator, whose id holds an address of the trainer's interface.
        environment |= interface_variables(where.network)
    if stage == "train" and where.hosts > 1:
        assert where.network is not None, "checked with the config"
        hosts = Hosts(
            run_url=arguments.run_url,
            attempt=arguments.attempt,
            host=arguments.replica,
            hosts=where.hosts,
            min_hosts=where.min_hosts or where.hosts,
            join_seconds=_JOIN_SECONDS,
            network=where.network,
            ranks=parallel.data // where.hosts * parallel.tensor,
        )
        launcher = [sys.executable, "-m", "millrace.runtime.host_launcher", hosts.to_json()]
        return start_command([*launcher, *program], stderr, threads, environment)
    if stage == "train" and (num_ranks := parallel.data * parallel.tensor) > 1:
        return start_command(launch(num_ranks, program), stderr, threads, environment)
    if stage == "generate" and config.generation.engine == "vllm":
        warn(f"generate-{arguments.replica} is started without the fork server: vLLM must not be forked")
        return start_command([sys.executable, *program], stderr, threads, environment)
    return STAGES.start(_module(stage), arguments.as_argv(), stderr, threads, warn, environment)


def _module(stage: str) -> str:
    return "millrace.stages.train.main" if stage == "train" else f"millrace.stages.{stage}"


def launch(num_ranks: int, program: list[str]) -> list[str]:
    """The command that runs `python PROGRAM` as this many ranks; their launcher is the process to supervise."""
    return [sys.executable, "-m", "millrace.runtime.launcher", str(num_ranks), *program]


def log_path(store: Store, name: str) -> Path:
    """The log in the run's folder if that is on this machine, otherwise in the temporary folder."""
    run = hashlib.sha256(store.url.encode()).hexdigest()[:16]
    temporary = Path(tempfile.gettempdir()) / f"millrace-{os.getuid()}" / run / name
    return store.local_path(name) or temporary
