"""From a request to a plan: which machine, which model, a search or a comparison."""

import os
from pathlib import Path
from typing import Any

from configs.load import parse_scalar, with_overrides
from configs.plan import PlanRequest
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.costs.campaign import shape_of_model
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.model_shape import ModelShape, shape_of_folder
from millrace.planning.fit.fit import fit_runs
from millrace.planning.plan import Plan, make_plan, what_if
from millrace.planning.search.candidates import values_of
from millrace.planning.search.gpus import GivenLengths, GpuMachine
from millrace.planning.search.machine import Machine
from millrace.planning.search.search import simulating
from millrace.planning.search.stored import StoredMachine
from millrace.runs.record import latest_attempt
from storage.stores.factory import open_store

_STEPS = 100
_ROLLOUTS, _ROUGH_ROLLOUTS = 150_000, 20_000
"""That are simulated of a config that is shown, and of each of some dozen others: a second or less."""


def answer(config: RunConfig, request: PlanRequest) -> Plan:
    """The plan of a request.

    Raises InputError or ConfigError, with one sentence, for hardware or models that are not known, a model that fits
    nowhere, a run too short to fit, and overrides that can't be; StorageError for a run that can't be read.
    """
    machine = _machine(config, request)
    run = simulating(_STEPS, _ROLLOUTS) if request.steps is None else simulating(request.steps)
    if request.what_if:
        values = values_of(config)
        after = with_overrides(values, request.what_if, where="the config", option="--what-if")
        return what_if(
            config,
            after,
            _values(request.what_if),
            machine,
            run,
            counts_gpus=isinstance(machine, GpuMachine),
            dollars_per_gpu_hour=_price(request),
        )
    if request.gpus is None and isinstance(machine, GpuMachine):
        raise InputError("how many GPUs? Expected --gpus, such as --gpus 16, or --what-if to compare two configs")
    return make_plan(
        config,
        machine,
        run,
        gpus=request.gpus if isinstance(machine, GpuMachine) else None,
        goal=request.goal,
        roughly=simulating(request.steps or _STEPS, _ROUGH_ROLLOUTS),
        batches=request.batches,
        dollars_per_gpu_hour=_price(request),
    )


def config_of_run(url: str) -> dict[str, Any]:
    """The config of a run's newest attempt, as JSON. Raises RunMissing, StorageError."""
    return latest_attempt(open_store(url)).config


def _machine(config: RunConfig, request: PlanRequest) -> Machine:
    if request.sources:
        if request.hardware is not None or request.gpus is not None or request.lengths is not None:
            raise InputError(
                "--from says what everything takes and how long responses are; expected no --hardware, --gpus and "
                "--lengths with it"
            )
        cores, cores_from = _cores(config, request)
        fitted = fit_runs([open_store(url) for url in request.sources], cores=cores)
        return StoredMachine(fitted=fitted, cores_from=cores_from)
    if request.hardware is None:
        raise InputError("on which machine? Expected --hardware with --gpus, or --from with a stored run")
    given = None if request.lengths is None else GivenLengths(**request.lengths.model_dump())
    return GpuMachine(shape=_shape(config, request), hardware=hardware_named(request.hardware), given=given)


def _shape(config: RunConfig, request: PlanRequest) -> ModelShape:
    if request.model is None:
        return shape_of_model(config)
    folder = Path(request.model)
    return shape_of_folder(folder) if folder.is_dir() else model_named(request.model)


def _cores(config: RunConfig, request: PlanRequest) -> tuple[float | None, str]:
    """How many the stages share, None if none, and who says so."""
    if request.cores is not None:
        return request.cores, "--cores"
    if config.training.device == "cpu":
        return float(os.cpu_count() or 1), "this host, taken for the runs'"
    return None, "training.device"


def _price(request: PlanRequest) -> float | None:
    if request.price is not None or request.hardware is None:
        return request.price
    return hardware_named(request.hardware).dollars_per_hour


def _values(overrides: list[str]) -> dict[str, Any]:
    pairs = (override.partition("=") for override in overrides)
    return {key: parse_scalar(text) for key, _, text in pairs}
