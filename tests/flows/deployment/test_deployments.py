"""prefect.yaml: what it deploys exists, takes the parameters it gives, and is the preset that people know."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from configs.load import load_config
from configs.schema import RunConfig
from flows.deployment.automations import automations
from flows.deployment.deploy import POOL, QUEUES

REPOSITORY = Path(__file__).parents[3]
PRESET = REPOSITORY / "configs" / "presets" / "tiny-cpu.yaml"
TEXT = (REPOSITORY / "prefect.yaml").read_text()
DEPLOYED: dict[str, dict[str, Any]] = {one["name"]: one for one in yaml.safe_load(TEXT)["deployments"]}
NEEDED: dict[str, dict[str, object]] = {
    "replay": {"request": {"sources": ["runs/mine"], "job": "verify", "run_id": "mine-verified"}},
    "plan": {
        "config": {"training": {"max_steps": 3}},
        "request": {"hardware": "h100", "gpus": 16, "model": "llama-8b"},
    },
    "evaluate": {"run_url": "runs/mine"},
    "gc": {"run_url": "runs/mine"},
}
"""What a person has to fill in, for there can be no default."""

by_name = pytest.mark.parametrize("name", DEPLOYED)


def flow_of(name: str) -> Flow[..., Any]:
    module, _, function = DEPLOYED[name]["entrypoint"].rpartition(".")
    found = getattr(importlib.import_module(module), function)
    assert isinstance(found, Flow)
    return found


def test_prefect_takes_the_file_for_what_it_is() -> None:
    model = PrefectYamlModel.model_validate(yaml.safe_load(TEXT))
    assert [deployment.name for deployment in model.deployments] == list(DEPLOYED)
    assert model.pull == [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}]


@by_name
def test_every_entrypoint_is_a_flow_of_the_name_that_is_deployed(name: str) -> None:
    assert flow_of(name).name == name


@by_name
def test_the_default_parameters_fit_the_schema_that_the_form_is_made_of(name: str) -> None:
    schema = parameter_schema(flow_of(name)).model_dump_for_openapi()
    parameters = {**DEPLOYED[name].get("parameters", {}), **NEEDED.get(name, {})}
    validate(parameters, schema, raise_on_error=True, ignore_required=False)
    flow_of(name).validate_parameters(parameters)


@by_name
def test_every_parameter_has_a_description_beside_it_in_the_form(name: str) -> None:
    schema = parameter_schema(flow_of(name))
    assert all(field.get("description") for field in schema.properties.values()), schema.properties


@by_name
def test_every_deployment_says_what_it_is_for_and_waits_in_a_queue_of_the_pool(name: str) -> None:
    deployment = DEPLOYED[name]
    assert deployment["description"] and "millrace" in deployment["tags"]
    assert deployment["work_pool"]["name"] == POOL
    assert deployment["work_pool"]["work_queue_name"] in QUEUES


@by_name
def test_no_flow_writes_into_a_pipe_that_a_killed_worker_would_break(name: str) -> None:
    assert DEPLOYED[name]["work_pool"]["job_variables"] == {"stream_output": False}


def test_the_campaign_is_the_tiny_preset_with_another_name_and_a_budget() -> None:
    preset = load_config(PRESET).model_dump()
    deployed = RunConfig.model_validate(DEPLOYED["campaign"]["parameters"]["config"]).model_dump()
    assert deployed["budget"].pop("duration_minutes") == 30
    preset["budget"].pop("duration_minutes")
    assert deployed == {**preset, "name": "tiny-nightly"}


def test_the_nightly_schedule_is_off_and_a_second_attempt_waits() -> None:
    (schedule,) = DEPLOYED["campaign"]["schedules"]
    assert (schedule["cron"], schedule["active"]) == ("0 1 * * *", False)
    assert DEPLOYED["campaign"]["parameters"]["resume"] == "latest"
    assert DEPLOYED["campaign"]["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_automations_that_stop_a_campaign_are_off_until_a_person_wants_them() -> None:
    stopping = {one.name: one.enabled for one in automations() if any(a.type == "cancel-flow-run" for a in one.actions)}
    assert len(stopping) == 2
    assert not any(stopping.values())
