"""How busy the stages of a stored run were, and how much slower they got for it."""

from millrace.planning.fit.read import Activities, MeasuredRun
from millrace.planning.fit.sharing import Load, Slowdowns, slowdowns

_WAITING = "waiting"


def measured_slowdowns(run: MeasuredRun, cores: float | None) -> Slowdowns:
    """Of a run whose stages shared so many cores; None: each had devices of its own."""
    return Slowdowns() if cores is None else slowdowns(busy_loads(run), cores)


def busy_loads(run: MeasuredRun) -> list[Load]:
    """The generators, the scorers and the trainer."""
    config = run.config
    stages = (
        ("generate", run.generators, config.generation.threads),
        ("score", run.scorers, config.scoring.threads),
        ("train", [run.trainer], config.training.threads),
    )
    return [
        Load(stage=stage, share=1 - idle_share(one, run), threads=threads)
        for stage, replicas, threads in stages
        for one in replicas
    ]


def idle_share(stage: Activities, run: MeasuredRun) -> float:
    """Share of the time after the warm-up in which a stage waited for others."""
    begin, end, seconds = stage.between(run.begin, run.end)
    waited = sum(spent for name, spent in seconds.items() if name.startswith(_WAITING))
    return min(1.0, waited / (end - begin)) if end > begin else 0.0
