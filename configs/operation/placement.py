"""On which hosts stages run."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from configs.section import Count, Section, Text, ipv4_network


class PlaceConfig(Section):
    """Where one stage runs."""

    work_pool: Text | None = None
    """Prefect work pool whose workers start the stage on their hosts; null: on the controller's host."""
    job_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of the pool's job template, such as the number of GPUs per job."""


class TrainPlaceConfig(PlaceConfig):
    """Where the trainer runs."""

    hosts: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of hosts among which the ranks are divided; must divide `training.parallel.data`. Each is a job of the
    pool; the first leads, and has sync_weights."""
    min_hosts: Count | None = None
    """With how many hosts the trainer goes on while others are missing, with fewer data ranks; null: it waits for all
    of them. A host that comes back is taken in again at the next step."""
    join_seconds: Annotated[float, Field(ge=5)] = 60.0
    """Time that it waits for missing hosts before it goes on with at least `min_hosts`, seconds."""
    network: Text | None = None
    """IPv4 network in which the hosts reach each other, such as 10.0.0.0/24: each listens at its own address in it and
    nowhere else. Any network but loopback is open to those in it."""

    @field_validator("network")
    @classmethod
    def _is_a_network(cls, network: str | None) -> str | None:
        return network if network is None else ipv4_network(network)


class PlacementConfig(Section):
    """On which hosts stages run. Each host must have access to `storage.root` and run the same code."""

    colocated: bool = False
    """Whether trainer and generators take turns on the same devices: a generator frees its device memory when it has
    made all trajectories of a version, the trainer after its step. Only in `sync` mode."""
    generate: PlaceConfig = Field(default_factory=PlaceConfig)
    """Generators; each is a separate job."""
    score: PlaceConfig = Field(default_factory=PlaceConfig)
    """Scorers; each is a separate job."""
    train: TrainPlaceConfig = Field(default_factory=TrainPlaceConfig)
    """Trainer and sync_weights; they share memory, so they are one job, with a further job for each further host."""
    evaluate: PlaceConfig = Field(default_factory=PlaceConfig)
    """The evaluation while training goes on, and at the end of an attempt."""
