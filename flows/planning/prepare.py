"""From a request to a plan: which machine, which model, a search or a comparison."""

import os
from pathlib import Path
from typing import Any

from configs.load import parse_scalar, with_overrides
from configs.requests import PlanRequest
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.candidate import Machine, explicit_values
from millrace.planning.gpus import GpuMachine, shape_of_model
from millrace.planning.hardware import hardware_named
from millrace.planning.models import ModelShape, model_named, shape_of_folder
from millrace.planning.plan import Plan, make_plan, what_if
from millrace.planning.search import simulator
from millrace.planning.stored import fit_machine
from millrace.runs.record import latest_attempt
from storage.stores.factory import open_store

_STEPS = 100
_ROLLOUTS, _COARSE_ROLLOUTS = 60_000, 10_000
"""That are simulated of a config that is shown, and of each of some dozen others: a second or less."""


def answer(config: RunConfig, request: PlanRequest) -> Plan:
    """The plan of a request.

    Raises InputError or ConfigError, with one sentence, for hardware or models that are not known, a model that fits
    nowhere, a run too short to fit, and overrides that can't be; StorageError for a run that can't be read.
    """
    machine = _machine(config, request)
    fine = simulator(_STEPS, _ROLLOUTS) if request.steps is None else simulator(request.steps)
    if request.what_if:
        values = explicit_values(config)
        after = with_overrides(values, request.what_if, where="the config", option="--what-if")
        return what_if(
            config,
            after,
            _values(request.what_if),
            machine,
            fine,
            divides_gpus=isinstance(machine, GpuMachine),
            dollars_per_gpu_hour=request.price,
        )
    if request.gpus is None and isinstance(machine, GpuMachine):
        raise InputError("how many GPUs? Expected --gpus, such as --gpus 16, or --what-if to compare two configs")
    return make_plan(
        config,
        machine,
        fine,
        gpus=request.gpus if isinstance(machine, GpuMachine) else None,
        goal=request.goal,
        coarse=simulator(request.steps or _STEPS, _COARSE_ROLLOUTS),
        batches=request.batches,
        dollars_per_gpu_hour=request.price,
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
        return fit_machine([open_store(url) for url in request.sources], cores=cores, cores_from=cores_from)
    if request.hardware is None:
        raise InputError("on which machine? Expected --hardware with --gpus, or --from with a stored run")
    hardware = hardware_named(request.hardware)
    return GpuMachine(shape=_shape(config, request), hardware=hardware, given=request.lengths)


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


def _values(overrides: list[str]) -> dict[str, Any]:
    pairs = (override.partition("=") for override in overrides)
    return {key: parse_scalar(text) for key, _, text in pairs}
