"""Which stages run together on one host, as `placement` says: the jobs of a campaign.

train + sync_weights     one place: weights pass from one to the other in shared memory
generate ×G, score ×S    a place each
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from configs.schema import RunConfig

StageName = Literal["generate", "score", "train", "sync_weights"]


class Seat(BaseModel):
    """One stage process of a place."""

    model_config = ConfigDict(frozen=True)

    stage: StageName
    replica: int
    threads: int
    """CPU threads of its mathematics."""


class Place(BaseModel):
    """Stages that run on one host."""

    model_config = ConfigDict(frozen=True)

    seats: tuple[Seat, ...]
    work_pool: str | None
    """Whose workers start them; None: they run beside the controller."""
    job_variables: dict[str, Any]

    @property
    def name(self) -> str:
        """After its first stage, such as `generate-1`."""
        return f"{self.seats[0].stage}-{self.number}"

    @property
    def number(self) -> int:
        """Replica of its first stage."""
        return self.seats[0].replica

    @property
    def sign_of_life(self) -> str:
        """Under which name, with its number, the host writes that it is there; see `millrace.hosts`."""
        return f"place-{self.seats[0].stage}"


def places(config: RunConfig) -> list[Place]:
    """Of a campaign, the trainer's first."""
    train = (
        Seat(stage="train", replica=0, threads=config.training.threads),
        Seat(stage="sync_weights", replica=0, threads=1),
    )
    generators = [
        (Seat(stage="generate", replica=g, threads=config.generation.threads),)
        for g in range(config.generation.replicas)
    ]
    scorers = [
        (Seat(stage="score", replica=s, threads=config.scoring.threads),) for s in range(config.scoring.replicas)
    ]
    placement = config.placement
    return [
        Place(seats=seats, work_pool=where.work_pool, job_variables=where.job_variables)
        for where, all_seats in (
            (placement.train, [train]),
            (placement.generate, generators),
            (placement.score, scorers),
        )
        for seats in all_seats
    ]
