"""A plan from a request, and its figures and tables.

config, request ─► machine: --hardware, or fitted to stored runs ─► search, or comparison of two configs ─► Plan
Plan ─► sections: figures, settings, runners-up, assumptions ─► terminal, or Markdown in the Prefect UI
"""

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from configs.load import parse_scalar, with_overrides
from configs.operation import PlacementConfig
from configs.requests import PlanRequest
from configs.schema import RunConfig
from flows.display.tables import TitledTable
from millrace.errors import InputError, writing
from millrace.planning.candidate import Candidate, Machine, explicit_values
from millrace.planning.durations import max_group_size, mean_group_size
from millrace.planning.gpus import GpuMachine
from millrace.planning.hardware import GIB, GPUS_PER_HOST, hardware_named
from millrace.planning.models import model_named, shape_of_folder, shape_of_model
from millrace.planning.plan import Plan, what_if
from millrace.planning.search import make_plan, simulator
from millrace.planning.stored import fit_machine
from millrace.runs.status import largest_and_bound
from millrace.runtime.devices import assign, gpus
from storage.stores.factory import open_store

_STEPS = 100
_ROLLOUTS, _SEARCHED_ROLLOUTS = 60_000, 15_000
"""Simulated of a config that is compared with one other, and of each of some dozens."""
_DAY = 86400.0
COLUMNS = ("trainer", "generators", "mode", "slots", "s/step", "tokens/s", "stale")


def answer(config: RunConfig, request: PlanRequest) -> Plan:
    """The plan of a request.

    Raises InputError or ConfigError for unknown hardware or models, a model that fits nowhere, a run too short to fit,
    and overrides that can't be; StorageError for a run that can't be read.
    """
    machine = _machine(config, request)
    rollouts = _ROLLOUTS if request.what_if else _SEARCHED_ROLLOUTS
    simulate = simulator(_STEPS, rollouts) if request.steps is None else simulator(request.steps)
    if request.what_if:
        after = with_overrides(explicit_values(config), request.what_if, where="the config", option="--what-if")
        changes = {key: parse_scalar(text) for key, _, text in (change.partition("=") for change in request.what_if)}
        return what_if(config, after, changes, machine, simulate, dollars_per_gpu_hour=request.price)
    if not request.sources and request.gpus is None:
        raise InputError("missing", key="--gpus", expected="how many GPUs, or --what-if to compare two configs")
    return make_plan(
        config,
        machine,
        simulate,
        gpus=request.gpus,
        goal=request.goal,
        batches=request.batches,
        dollars_per_gpu_hour=request.price,
    )


def _machine(config: RunConfig, request: PlanRequest) -> Machine:
    if request.sources:
        if request.hardware is not None or request.gpus is not None or request.lengths is not None:
            raise InputError("--from is given", expected="no --hardware, --gpus and --lengths with it")
        cores = request.cores
        if cores is None and config.training.device == "cpu":
            cores = float(os.cpu_count() or 1)
        return fit_machine([open_store(url) for url in request.sources], cores=cores)
    if request.hardware is None:
        raise InputError("no machine is given", expected="--hardware with --gpus, or --from with a stored run")
    hardware = hardware_named(request.hardware)
    if request.model is None:
        shape = shape_of_model(config)
    else:
        folder = Path(request.model)
        shape = shape_of_folder(folder) if folder.is_dir() else model_named(request.model)
    return GpuMachine(shape=shape, hardware=hardware, given_lengths=request.lengths)


def write_config(plan: Plan, path: Path) -> None:
    """Writes the chosen config, for `millrace run`. Raises InputError if it does not fit or can't be written."""
    outcome = plan.chosen.outcome
    if outcome is None:
        raise InputError(f"not written, because the config {plan.chosen.reason}", file=path)
    values = plan.config().model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    comment = (
        f"# Made by `millrace plan`: {headline(plan)}.\n"
        f"# Predicted: {outcome.step_seconds:.4g} s per step, {outcome.tokens_per_second:,.4g} tokens per second, "
        f"mean staleness {outcome.staleness_mean:.2f}, {outcome.dropped_share:.1%} of the rollouts dropped.\n"
    )
    with writing(path):
        path.write_text(comment + text, encoding="utf-8")


def headline(plan: Plan) -> str:
    """The question and the machine, in a line."""
    if plan.is_what_if:
        return f"{plan.base.name}: {plan.machine}, as it is and changed"
    gpus = "" if plan.gpus is None else f", {plan.gpus} GPUs"
    return (
        f"{plan.base.name}: {plan.machine}{gpus}: the {plan.goal} of {plan.num_layouts:,} layouts; "
        f"{len(plan.simulated)} configs simulated"
    )


def sections(plan: Plan) -> Iterator[TitledTable]:
    """The plan as titled tables, for a terminal and for Markdown."""
    compared = plan.entries if plan.is_what_if else [plan.chosen]
    columns = [_figures(entry, plan) for entry in compared]
    header = ("figure", "as it is", "changed") if plan.is_what_if else ("figure", "value")
    # A config that does not fit has fewer figures.
    names = max(columns, key=len)
    yield TitledTable(
        title="", header=header, rows=[(name, *(column.get(name, "–") for column in columns)) for name in names]
    )
    changes = plan.changes(plan.chosen).items()
    yield TitledTable(title="settings", lines=[f"{key}={_scalar(value)}" for key, value in changes])
    if not plan.is_what_if:
        runners_up = list(enumerate(plan.entries[1:], 1))
        yield TitledTable(
            title="runners-up",
            header=("", *COLUMNS),
            rows=[(str(number), *line(entry)) for number, entry in runners_up],
            numbers=4,
            lines=[f"{number}: {entry.reason}" for number, entry in runners_up],
        )
    yield TitledTable(title="assumptions", lines=[f"{subject}: {text}" for subject, text in plan.assumptions.items()])


def line(entry: Candidate) -> tuple[str, ...]:
    """One entry, by `COLUMNS`."""
    outcome, measured = entry.outcome, ("–", "–", "–")
    if outcome is not None:
        rate = f"{outcome.tokens_per_second:,.0f}"
        measured = (f"{outcome.step_seconds:.4g}", rate, f"{outcome.staleness_mean:.2f}")
    return (entry.trainer, entry.generators, entry.mode, _slots(entry), *measured)


def _figures(entry: Candidate, plan: Plan) -> dict[str, str]:
    config, outcome, divides_gpus = entry.config, entry.outcome, entry.gpus is not None
    figures = {"trainer GPUs": entry.trainer} if divides_gpus else {}
    figures |= {
        "generator GPUs" if divides_gpus else "generators": entry.generators,
        "mode": entry.mode,
        "slots": f"{_slots(entry)}: generators × groups × responses in flight",
        "batch": f"{config.training.groups_per_step} × {mean_group_size(config):g} responses per step",
    }
    if outcome is not None:
        dropped, masked = f"{outcome.dropped_share:.1%}", f"{outcome.masked_token_share:.1%}"
        largest = largest_and_bound(
            outcome.staleness_max, config.effective_max_staleness, admission_only=config.bounds_admission_only
        )
        figures |= {
            "step": f"{outcome.step_seconds:.4g} s",
            "speed": f"{outcome.tokens_per_second:,.0f} response tokens trained per second",
            "staleness": f"mean {outcome.staleness_mean:.2f}, max {largest}",
            "dropped, masked": f"{dropped} of the rollouts, {masked} of the tokens",
            "idle": ", ".join(f"{stage} {share:.0%}" for stage, share in outcome.idle.items()),
        }
    if (costs := entry.costs) is not None:
        figures["weight sync"] = (
            f"{costs.push:.3g} s by {config.effective_weights.transport} while both continue; the trainer stands still "
            f"for {costs.handover:.2g} s, a generator for {costs.pause:.2g} s"
        )
    if (layout := _layout_on_a_host(entry)) is not None:
        figures["on one host"] = layout
    if (memory := entry.memory) is not None:
        needs = f"trainer {memory.trainer / GIB:.0f}, generator {memory.generator / GIB:.0f}"
        figures["memory"] = f"{needs} of {memory.capacity / GIB:.0f} GiB per GPU"
    if outcome is not None and entry.gpus is not None:
        figures |= _bill(entry, plan, outcome.step_seconds, entry.gpus)
    return {**figures, "result": (entry.reason if outcome is None else entry.bottleneck)}


def _layout_on_a_host(entry: Candidate) -> str | None:
    """The GPUs of each process if one host has enough for all; None if not, or if GPUs are not divided."""
    if entry.gpus is None or entry.gpus > GPUS_PER_HOST or entry.config.placement.train.hosts > 1:
        return None
    config, generation = entry.config, entry.config.generation
    # A plan for GPUs is for the trainer on GPUs, and for vLLM, whatever the config names.
    changes = {
        "training": config.training.model_copy(update={"device": "cuda"}),
        "generation": generation.model_copy(update={"engine": "vllm"}),
        "placement": PlacementConfig(colocated=config.placement.colocated),
    }
    on_gpus = config.model_copy(update=changes)
    processes = [("train", 0), *(("generate", replica) for replica in range(generation.replicas))]
    assignment = assign(on_gpus, processes, [str(index) for index in range(entry.gpus)])
    return "; ".join(f"{stage}-{replica} on {gpus(assignment[stage, replica])}" for stage, replica in processes)


def _bill(entry: Candidate, plan: Plan, step_seconds: float, gpus: int) -> dict[str, str]:
    million = entry.gpu_hours_per_million_tokens
    per_step, per_day = plan.dollars(entry, step_seconds), plan.dollars(entry, _DAY)
    return {
        "GPU-hours": f"{gpus * step_seconds / 3600:.3g} per step, {million:.3g} per million tokens trained",
        "cost": "give --price" if per_step is None else f"${per_step:,.2f} per step, ${per_day:,.0f} a day",
    }


def _slots(entry: Candidate) -> str:
    generation = entry.config.generation
    return f"{generation.replicas} × {generation.groups_per_batch} × {max_group_size(entry.config)}"


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
