"""The jobs of a campaign: groups of stages that run together on one host, as `placement` says.

train + sync_weights              one job: weights pass between them in shared memory
train on each further host        one job each, if the trainer has several hosts
generate ×G, score ×S, teach ×T   one job each
evaluate                          one job
evaluate, promote at the end      one job each
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from configs.operation import PlaceConfig
from configs.schema import RunConfig
from millrace.runtime.arguments import EVALUATE_AT_END, EVALUATE_BESIDE
from millrace.runtime.devices import Process

StageName = Literal["generate", "score", "teach", "train", "sync_weights", "evaluate", "promote"]


class StageProcess(BaseModel):
    """A stage process of a job."""

    model_config = ConfigDict(frozen=True)

    stage: StageName
    replica: int
    """For the trainer, the number of its host."""
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
    def members(self) -> list[Process]:
        """Stage and replica of each of its processes."""
        return [(process.stage, process.replica) for process in self.processes]

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
        """Whether the campaign continues after its end: the trainer ends with its first host."""
        first = self.processes[0]
        return first.stage == "evaluate" or (first.stage == "train" and first.replica > 0)

    @property
    def status_record(self) -> str:
        """The name, with `number`, of the host's status record; see `millrace.runtime.heartbeat`."""
        return f"place-{self.processes[0].stage}"


def jobs(config: RunConfig) -> list[Job]:
    """All jobs that run side by side in a campaign, the trainer's first."""
    placement, pools = config.placement, config.annotators
    # The threads of each replica.
    groups: list[tuple[StageName, PlaceConfig, list[int]]] = [
        ("train", placement.train, [config.training.num_threads] * placement.train.hosts),
        ("generate", placement.generate, [config.generation.num_threads] * config.generation.replicas),
        ("score", placement.score, [config.scoring.threads] * pools.total("scores")),
        ("teach", placement.teach, [config.teacher_of(t)[1].threads for t in range(pools.total("teachers"))]),
    ]
    jobs = []
    for stage, where, threads_of_replicas in groups:
        for replica, threads in enumerate(threads_of_replicas):
            processes = [StageProcess(stage=stage, replica=replica, threads=threads)]
            if stage == "train" and replica == 0:
                processes.append(StageProcess(stage="sync_weights", replica=0, threads=1))
            jobs.append(Job(processes=tuple(processes), work_pool=where.work_pool, job_variables=where.job_variables))
    return [*jobs, _evaluation_job(config, "evaluate", EVALUATE_BESIDE)]


def jobs_at_end(config: RunConfig) -> list[Job]:
    """The jobs that end an attempt, one after the other: evaluation of the latest checkpoint, and promotion."""
    return [_evaluation_job(config, "evaluate", EVALUATE_AT_END), _evaluation_job(config, "promote", 0)]


def _evaluation_job(config: RunConfig, stage: StageName, replica: int) -> Job:
    where = config.placement.evaluate
    process = StageProcess(stage=stage, replica=replica, threads=config.training.num_threads)
    return Job(processes=(process,), work_pool=where.work_pool, job_variables=where.job_variables)


def processes_here(config: RunConfig) -> list[Process]:
    """Stage and replica of each process of the jobs on the controller's host."""
    return [member for job in jobs(config) if job.work_pool is None for member in job.members]


def stages_here(config: RunConfig) -> list[str]:
    """Stages that run on the controller's host, with those before and after training."""
    return ["bootstrap", "evaluate", "promote", *dict.fromkeys(stage for stage, _ in processes_here(config))]
