"""prefect.yaml: each deployment is a flow of this project that accepts the given parameters."""

import importlib
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from configs.load import load_config
from configs.schema import RunConfig
from flows.deployment.deploy import POOL, QUEUES, automations
from millrace.runtime.messages import EventKind

REPOSITORY = Path(__file__).parents[3]
PRESET = REPOSITORY / "configs" / "presets" / "tiny-cpu.yaml"
TEXT = (REPOSITORY / "prefect.yaml").read_text()
DEPLOYED: dict[str, dict[str, Any]] = {
    deployment["name"]: deployment for deployment in yaml.safe_load(TEXT)["deployments"]
}
NEEDED: dict[str, dict[str, object]] = {
    "replay": {"request": {"sources": ["runs/mine"], "job": "verify", "run_id": "mine-verified"}},
    "plan": {
        "config": {"training": {"max_steps": 3}},
        "request": {"hardware": "h100", "gpus": 16, "model": "llama-8b"},
    },
    "distill": {"teacher": "runs/mine"},
    "sft": {"model": "models/mine", "prompts": "shown.jsonl"},
    "evaluate": {"run_url": "runs/mine"},
    "gc": {"run_url": "runs/mine"},
}
"""Parameters without a default."""

by_name = pytest.mark.parametrize("name", DEPLOYED)


def flow_of(name: str) -> Flow[..., Any]:
    module, _, function = DEPLOYED[name]["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), function)
    assert isinstance(flow, Flow)
    return flow


def test_prefect_accepts_the_file() -> None:
    model = PrefectYamlModel.model_validate(yaml.safe_load(TEXT))
    assert [deployment.name for deployment in model.deployments] == list(DEPLOYED)
    assert model.pull == [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}]


@by_name
def test_a_deployment_is_complete(name: str) -> None:
    deployment = DEPLOYED[name]
    assert flow_of(name).name == name
    assert deployment["description"] and "millrace" in deployment["tags"]
    assert deployment["work_pool"]["name"] == POOL
    assert deployment["work_pool"]["work_queue_name"] in QUEUES
    # A killed worker would break a pipe to the flow.
    assert deployment["work_pool"]["job_variables"] == {"stream_output": False}


@by_name
def test_the_form_takes_the_default_parameters_and_describes_each(name: str) -> None:
    schema = parameter_schema(flow_of(name))
    parameters = {**DEPLOYED[name].get("parameters", {}), **NEEDED.get(name, {})}
    validate(parameters, schema.model_dump_for_openapi(), raise_on_error=True, ignore_required=False)
    flow_of(name).validate_parameters(parameters)
    assert all(field.get("description") for field in schema.properties.values()), schema.properties


def test_the_form_shows_the_values_of_each_preset_and_sets_none_of_them() -> None:
    fields = parameter_schema(flow_of("campaign-from-preset")).properties
    assert "In the presets: 250 (tiny-cpu), 50 (calculator-cpu, distill-cpu)" in fields["max_steps"]["description"]
    assert "In all presets: null." in fields["duration_minutes"]["description"]
    changes = {"name", "max_steps", "duration_minutes", "model", "prompts", "reward", "learning_rate", "max_staleness"}
    assert all(fields[name]["default"] is None for name in changes)


def test_the_campaign_is_the_tiny_preset_with_a_budget() -> None:
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


def test_automations_that_stop_a_campaign_start_switched_off() -> None:
    stopping = [
        automation.enabled
        for automation in automations()
        if any(action.type == "cancel-flow-run" for action in automation.actions)
    ]
    assert stopping == [False, False]


def test_alerts_go_to_each_block_and_to_nobody_without_one() -> None:
    blocks = [uuid4(), uuid4()]
    *others, alert = automations(blocks)
    assert others == automations()
    assert [action.block_document_id for action in alert.actions] == blocks


def test_automations_wait_for_events_that_exist() -> None:
    expected = {event for automation in automations([uuid4()]) for event in automation.trigger.expect}
    own = {event.removeprefix("millrace.") for event in expected if event.startswith("millrace.")}
    assert own
    assert own <= set(get_args(EventKind))
