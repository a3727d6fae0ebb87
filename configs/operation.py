"""How a run is operated: staleness control, weight sync, storage, hosts, and limits."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from configs.section import Count, NonNegative, Positive, Section, Text, ipv4_network

if TYPE_CHECKING:
    from configs.schema import RunConfig

Versions = Annotated[int, Field(ge=0)]


Transport = Literal["auto", "shm", "direct", "store", "ipc", "nccl", "nccl_m2n", "gloo"]
LIVE = frozenset({"ipc", "nccl", "nccl_m2n", "gloo"})
"""Weights go from the trainer's ranks straight into vLLM's workers, by vLLM's engine of this name."""
SHARDED = LIVE | {"direct"}
"""Each trainer rank sends its shards, led by sync_weights."""


class StalenessConfig(Section):
    """Maximum age of a trajectory when it is trained on."""

    min_staleness: ClassVar[int] = 1
    """Lowest bound of `adaptive` control."""
    ess_target: ClassVar[float] = 0.95
    """With `adaptive` control the bound falls while the effective sample size of the ratios π/μ, as a share of what it
    is on policy, is below this."""
    max_staleness: Versions = 4
    """Maximum policy versions by which the trainer is ahead of the oldest one in a trajectory; 0 in `sync` mode. With
    `too_old: keep` it limits only which groups are admitted to generation."""
    too_old: Literal["keep", "mask", "drop", "wait"] = "keep"
    """What happens to a group with tokens older than that. `keep`: the whole group is trained on, each token with its
    importance weight; `mask`: these tokens have no loss, and the rest of the group is trained on; `drop`: the whole
    group is dropped; `wait`: no step is made that would leave a group in flight too old. No effect in `sync` mode."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: the bound is `max_staleness`. `adaptive`: the trainer moves the bound between 1 and `max_staleness`, and
    the number of responses in flight, by its measurements (docs/control.md)."""


class WeightsConfig(Section):
    """How new policy versions are sent to the generators."""

    transport: Transport = "auto"
    """`shm`: shared memory on one host; `direct`: shards from trainer ranks to generators, on one host or several;
    `store`: files in the run's storage, for hosts any distance apart. From the trainer's GPUs straight to vLLM's, by
    vLLM's own engines: `ipc` on one shared GPU; `nccl`: tensor by tensor, packed; `nccl_m2n`: from shards to shards,
    or as `nccl` where it can't divide the model; `gloo`: as `nccl`, between CPUs. `auto`: `ipc` or `nccl_m2n` for vLLM
    on GPUs, otherwise `shm` on one host, and on several `direct`, or `store` for LoRA; sync_weights logs the choice."""
    deadline_seconds: Positive = 30.0
    """Time for a generator to receive a version, seconds. A generator that takes longer is named in the log and gets it
    through the store."""


class StorageConfig(Section):
    """Where the run is stored, and when generators commit trajectories."""

    root: Text = "runs"
    """Path, file:///path, s3://bucket/prefix or memory://name; the run is stored at root/run id."""
    commit_max_ms: NonNegative = 10.0
    """A generator commits once the oldest finished trajectory has waited this long, milliseconds, or once there are
    4096 of them or 64 MiB; 0 commits each batch before the next."""
    commit_unfinished_seconds: Positive | None = None
    """How often a generator also stores its unfinished responses, seconds, to continue them after kill -9. Each time
    the engine reads their tokens again. null: only when the generator drains. No effect in `sync` mode."""


class PromotionConfig(Section):
    """When the latest checkpoint is promoted. It is evaluated at the end of each attempt."""

    margin: NonNegative | None = 0.0
    """A checkpoint is promoted if its held-out accuracy exceeds that of the last promoted one (at first the start
    model's) by more than this; null: never."""


class BudgetConfig(Section):
    """Limits of one attempt, such as one night of a campaign. The next attempt continues the run."""

    duration_minutes: Positive | None = None
    """After this time the stages drain and the last checkpoint is evaluated, minutes; null: no limit."""
    max_steps: Count | None = None
    """Maximum optimizer steps of one attempt; null: only `training.max_steps` applies."""


class MirrorConfig(Section):
    """Trackers that the run's metrics are copied to while it runs, as `millrace mirror` does; null: not there."""

    tensorboard: Text | None = None
    """Folder; event files are written to a folder in it with the run's id."""
    wandb: Text | None = None
    """Project of Weights & Biases; offline, unless WANDB_MODE says otherwise."""
    mlflow: Text | None = None
    """Experiment of MLflow, in the store MLFLOW_TRACKING_URI."""
    trackio: Text | None = None
    """Project of trackio."""
    otlp: Text | None = None
    """URL of an OpenTelemetry receiver, which gets a trace of each trajectory."""


class SupervisionConfig(Section):
    """When a stage counts as hung, so that it is named in the log, killed and restarted; and how long it may drain."""

    hang_seconds: Positive = 120.0
    """Maximum time without progress, seconds. A layer of a pass counts as progress, and so does a sampled token; an
    upload of a file does not."""
    start_seconds: Positive = 600.0
    """The same limit while a stage starts and loads its model, seconds."""
    drain_seconds: Positive = 600.0
    """Maximum time for a stage that is asked to stop to finish its optimizer step, batch or checkpoint, seconds. Then
    it is killed, and its uncommitted work is lost."""


Device = Annotated[int, Field(ge=0)] | Text
"""A GPU as CUDA_VISIBLE_DEVICES names it: its index, its UUID or that of a MIG instance."""


class PlaceConfig(Section):
    """Where one stage runs."""

    work_pool: Text | None = None
    """Prefect work pool whose workers start the stage on their hosts; null: on the controller's host."""
    job_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of the pool's job template, such as the number of GPUs per job."""
    devices: list[Device] | None = None
    """GPUs of each host that this stage may use, such as [4, 5], which its replicas and ranks divide in this order: by
    index, or as CUDA_VISIBLE_DEVICES names them where it is set. null: of all GPUs that no other stage names, the first
    free ones."""

    @field_validator("devices")
    @classmethod
    def _differ(cls, devices: list[int | str] | None) -> list[int | str] | None:
        if devices is not None and not devices:
            raise ValueError("at least one GPU, or null")
        if devices is not None and len({str(device) for device in devices}) < len(devices):
            raise ValueError("a list that names each GPU once")
        return devices


class TrainPlaceConfig(PlaceConfig):
    """Where the trainer runs."""

    hosts: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of hosts among which the ranks are divided; must divide `training.parallel.data`. Each is a job of the
    pool; the first leads, and has sync_weights."""
    min_hosts: Count | None = None
    """Number of hosts with which the trainer continues, with fewer data ranks, once others have been missing for half a
    minute;
    null: it waits for all of them. A host that comes back is taken in again at the next step."""
    network: Text | None = None
    """IPv4 network in which the hosts reach each other, and generators reach sync_weights with the transport `direct`,
    such as 10.0.0.0/24: each listens at its own address in it and nowhere else. gloo and NCCL use its interface, in
    vLLM too if weights go straight to its GPUs. Any network but loopback is open to those in it. null: loopback."""

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
    teach: PlaceConfig = Field(default_factory=PlaceConfig)
    """Teachers; each is a separate job."""
    train: TrainPlaceConfig = Field(default_factory=TrainPlaceConfig)
    """Trainer and sync_weights; they share memory, so they are one job, with a further job for each further host."""
    evaluate: PlaceConfig = Field(default_factory=PlaceConfig)
    """The evaluation during training, and at the end of an attempt."""


class Choice(NamedTuple):
    """A transport, and the reason for it as a clause."""

    transport: Transport
    reason: str


def choose_transport(config: "RunConfig") -> Choice:
    """Returns the transport that `weights.transport` stands for."""
    chosen, configured = _choose(config), config.weights.transport
    return chosen if configured in ("auto", chosen.transport) else Choice(configured, "as configured")


def one_gpu(config: "RunConfig") -> bool:
    """Whether the trainer has one rank, and the only generator one worker."""
    parallel = config.training.parallel
    return parallel.data * parallel.tensor == 1 == config.generation.replicas * vllm_workers(config)


def data_parallel(config: "RunConfig") -> bool:
    """Whether each generator is several of vLLM's data-parallel engines."""
    return int(config.generation.engine_args.get("data_parallel_size", 1)) > 1


def vllm_workers(config: "RunConfig") -> int:
    """Number of vLLM's workers per generator, a GPU each."""
    arguments = config.generation.engine_args
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def _choose(config: "RunConfig") -> Choice:
    placement, training = config.placement, config.training
    pools = {placement.train.work_pool, placement.generate.work_pool} - {None}
    on_gpus = config.generation.engine == "vllm" and training.device == "cuda"
    if on_gpus and training.lora.rank is None and not data_parallel(config):
        if not placement.colocated and (not pools or placement.train.network is not None):
            return Choice("nccl_m2n", "trainer and vLLM have different GPUs")
        if placement.colocated and one_gpu(config) and not pools:
            return Choice("ipc", "trainer and vLLM share one GPU")
    if not pools:
        return Choice("shm", "all stages are on one host")
    if training.lora.rank is not None:
        return Choice("store", "stages may be on several hosts, and adapters are small")
    if placement.train.network is None:
        return Choice("store", "stages may be on several hosts, and placement.train.network is null")
    return Choice("direct", "stages may be on several hosts")
