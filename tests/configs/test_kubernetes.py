"""The Jobs that a Kubernetes work pool makes of its template: Kubernetes accepts them, and they can do no harm."""

import asyncio
import json
import re
import shlex
import uuid
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME, temporary_settings
from prefect.utilities.schema_tools import ValidationError, validate
from prefect.utilities.templating import find_placeholders
from prefect.workers.base import BaseJobConfiguration

import configs
from configs.schema import RunConfig

TEMPLATE = json.loads((Path(configs.__file__).parent / "kubernetes" / "work-pool.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
VERSIONS = ("1.30", "1.37")

PLAIN = {"image": "registry.test/millrace:1"}
LARGE = PLAIN | {
    "gpus": 2,
    "cpu": "8",
    "memory": "64Gi",
    "shm_size": "16Gi",
    "secret_env": "keys-of-s3",
    "namespace": "post-training",
    "service_account_name": "stages",
    "node_selector": {"accelerator": "h200"},
    "labels": {"team": "research"},
    "ttl_seconds_after_finished": 60,
    "env": {"AWS_REGION": "eu-central-1"},
}


class Configuration(BaseJobConfiguration):
    """Renders the template as prefect-kubernetes' worker does, which needs a cluster's client library."""

    namespace: str
    job_manifest: dict[str, Any]

    def job(self) -> dict[str, Any]:
        metadata, container = self.job_manifest["metadata"], container_of(self.job_manifest)
        metadata |= {"labels": self.labels, "annotations": {}, "generateName": "prefect-job-"}
        container["args"] = shlex.split(container["args"])
        container["env"] = [{"name": name, "value": value} for name, value in self.env.items()]
        return self.job_manifest


def rendered(job_variables: dict[str, Any]) -> dict[str, Any]:
    """The Job for one flow run, as a worker asks for it that has a few settings of its own."""
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="generate-0 of my-run")
    # It would be asked for blocks and variables, of which the template has none.
    client = PrefectClient("http://nobody.invalid/api")
    settings = {
        PREFECT_API_URL: "http://prefect.test/api",
        PREFECT_API_AUTH_STRING: "user:from-the-worker",
        PREFECT_HOME: Path("/home/of/the/worker"),
    }
    with temporary_settings(settings):
        configuration = asyncio.run(Configuration.from_template_and_values(TEMPLATE, job_variables, client=client))
        configuration.prepare_for_flow_run(run)
    return configuration.job()


def check(job_variables: dict[str, Any]) -> None:
    """Validate as the server does before it makes a flow run. Raises ValidationError."""
    defaults = {
        name: variable["default"]
        for name, variable in TEMPLATE["variables"]["properties"].items()
        if "default" in variable
    }
    validate(defaults | job_variables, TEMPLATE["variables"], raise_on_error=True, preprocess=True)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(job)["containers"]
    assert isinstance(container, dict)
    return container


def environment_of(job: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container_of(job)["env"]}


def without_prefects_own(job: dict[str, Any]) -> dict[str, Any]:
    # Prefect's worker insists on these two at a place where Kubernetes knows none of the kind, and drops them.
    assert (pod_of(job).pop("parallelism"), pod_of(job).pop("completions")) == (1, 1)
    return job


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job_variables", [PLAIN, LARGE], ids=["plain", "large"])
def test_kubernetes_accepts_the_job(job_variables: dict[str, Any], version: str) -> None:
    check(job_variables)
    kubernetes_validate.validate(without_prefects_own(rendered(job_variables)), version, strict=True)


def test_kubernetes_would_not_accept_a_field_it_does_not_know() -> None:
    job = without_prefects_own(rendered(PLAIN))
    container_of(job)["volumeMount"] = container_of(job).pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_prefects_server_accepts_the_template() -> None:
    # Late: every process that collects the tests would wait for the server's packages.
    from prefect.server.schemas.actions import WorkPoolCreate

    pool = WorkPoolCreate(name="gpus", type="kubernetes", base_job_template=TEMPLATE)
    assert pool.base_job_template == TEMPLATE


def test_every_variable_is_used() -> None:
    # `env` has no placeholder: Prefect adds it to the environment that the template brings along.
    used = {placeholder.name for placeholder in find_placeholders(json.dumps(TEMPLATE["job_configuration"]))}
    assert used | {"env"} == set(TEMPLATE["variables"]["properties"])


def test_a_job_gets_its_gpus_and_one_without_asks_for_none() -> None:
    assert container_of(rendered(LARGE))["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 2},
    }
    assert container_of(rendered(PLAIN))["resources"]["limits"] == {"memory": "8Gi"}


@pytest.mark.parametrize(("job_variables", "size"), [(PLAIN, "2Gi"), (LARGE, "16Gi")], ids=["plain", "large"])
def test_shared_memory_is_mounted_where_weights_are_handed_over(job_variables: dict[str, Any], size: str) -> None:
    job = rendered(job_variables)
    (mount,), (volume,) = container_of(job)["volumeMounts"], pod_of(job)["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_a_stopped_pod_may_drain_and_is_not_restarted_by_kubernetes() -> None:
    job = rendered(PLAIN)
    assert pod_of(job)["terminationGracePeriodSeconds"] >= 60
    assert (job["spec"]["backoffLimit"], pod_of(job)["restartPolicy"]) == (0, "Never")


def test_sigterm_reaches_the_flow_run_itself_which_prefect_does_not_schedule_again() -> None:
    job = rendered(PLAIN)
    assert container_of(job)["args"] == ["python", "-m", "prefect.engine"]
    assert environment_of(job)["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "crash"


def test_nothing_secret_and_no_folder_of_the_workers_gets_into_the_job() -> None:
    job = rendered(LARGE)
    environment = environment_of(job)
    assert environment["PREFECT_API_URL"] == "http://prefect.test/api", "the worker's settings never got there"
    assert "from-the-worker" not in json.dumps(job)
    assert "PREFECT_HOME" not in environment
    assert container_of(job)["envFrom"] == [{"secretRef": {"name": "keys-of-s3"}}]


def test_an_environment_is_added_to_the_templates_own() -> None:
    added = environment_of(rendered(LARGE)).items() - environment_of(rendered(PLAIN)).items()
    assert {pair for pair in added if not pair[0].startswith("PREFECT__FLOW")} == {("AWS_REGION", "eu-central-1")}


def test_a_pod_may_do_no_more_than_it_must() -> None:
    job = rendered(LARGE)
    pod, container = pod_of(job), container_of(job)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert [set(volume) for volume in pod["volumes"]] == [{"name", "emptyDir"}]


@pytest.mark.parametrize(
    ("job_variables", "named"),
    [
        ({}, "image"),
        (PLAIN | {"gpu": 1}, "gpu"),
        (PLAIN | {"gpus": "2"}, "gpus"),
        (PLAIN | {"gpus": 0}, "gpus"),
        (PLAIN | {"cpu": 4}, "cpu"),
        (PLAIN | {"memory": "64 GB"}, "memory"),
        (PLAIN | {"shm_size": "16Gib"}, "shm_size"),
        (PLAIN | {"secret_env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "secret_env"),
        (PLAIN | {"env": [{"name": "A", "value": "b"}]}, "env"),
        (PLAIN | {"node_selector": {"gpu": True}}, "node_selector"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_mistaken_variable_is_refused_by_its_name(job_variables: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=rf"'{named}[.']"):
        check(job_variables)


def test_the_configuration_on_the_page_is_one_that_runs() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    config = RunConfig.model_validate(yaml.safe_load(text) | {"training": {"max_steps": 1}})
    placed = (config.placement.train, config.placement.generate)
    for place in placed:
        assert place.work_pool == "gpus"
        check(place.job_variables)
    jobs = [container_of(rendered(place.job_variables)) for place in placed]
    assert ["nvidia.com/gpu" in job["resources"]["limits"] for job in jobs] == [False, True]
