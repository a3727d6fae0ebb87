"""The jobs of a campaign: which stages run together on one host, as `placement` says.

train + sync_weights              one job: weights pass between them in shared memory
train on each further host        one job each, if the trainer has several hosts
generate ×G, score ×S, evaluate   one job each
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from configs.schema import RunConfig
from millrace.runtime.arguments import EVALUATE_BESIDE

StageName = Literal["generate", "score", "train", "sync_weights", "evaluate"]


class StageProcess(BaseModel):
    """One stage process of a job."""

    model_config = ConfigDict(frozen=True)

    stage: StageName
    replica: int
    """Of the trainer: the number of its host."""
    threads: int
    """CPU threads for its computation."""


class Job(BaseModel):
    """Stages that run on one host."""

    model_config = ConfigDict(frozen=True)

    processes: tuple[StageProcess, ...]
    work_pool: str | None
    """The pool whose workers start them; None: they run on the controller's host."""
    job_variables: dict[str, Any]

    @property
    def name(self) -> str:
        """Named after its first stage, such as `generate-1`."""
        return f"{self.processes[0].stage}-{self.number}"

    @property
    def number(self) -> int:
        """Replica of its first stage."""
        return self.processes[0].replica

    @property
    def may_end_first(self) -> bool:
        """Whether its end is no reason to end the campaign: the trainer ends with its first host."""
        first = self.processes[0]
        return first.stage == "evaluate" or (first.stage == "train" and first.replica > 0)

    @property
    def status_record(self) -> str:
        """With `number`, names the host's status record; see `millrace.runtime.heartbeat`."""
        return f"place-{self.processes[0].stage}"


def jobs(config: RunConfig) -> list[Job]:
    """All jobs that run side by side in a campaign, the trainer's first."""
    placement = config.placement
    trainer: list[tuple[StageProcess, ...]] = [
        (StageProcess(stage="train", replica=host, threads=config.training.threads),)
        for host in range(placement.train.hosts)
    ]
    trainer[0] += (StageProcess(stage="sync_weights", replica=0, threads=1),)
    generators = [
        (StageProcess(stage="generate", replica=g, threads=config.generation.threads),)
        for g in range(config.generation.replicas)
    ]
    scorers = [
        (StageProcess(stage="score", replica=s, threads=config.scoring.threads),)
        for s in range(config.scoring.replicas)
    ]
    stages = [
        Job(processes=processes, work_pool=where.work_pool, job_variables=where.job_variables)
        for where, groups in ((placement.train, trainer), (placement.generate, generators), (placement.score, scorers))
        for processes in groups
    ]
    return [*stages, evaluation_job(config, EVALUATE_BESIDE)]


def evaluation_job(config: RunConfig, replica: int) -> Job:
    """The job of one replica of the evaluate stage."""
    where = config.placement.evaluate
    process = StageProcess(stage="evaluate", replica=replica, threads=config.training.threads)
    return Job(processes=(process,), work_pool=where.work_pool, job_variables=where.job_variables)


def stages_here(config: RunConfig) -> list[str]:
    """Stages that run on the controller's host, with those before and after training."""
    here = [process.stage for job in jobs(config) if job.work_pool is None for process in job.processes]
    return ["bootstrap", "evaluate", "promote", *dict.fromkeys(here)]
