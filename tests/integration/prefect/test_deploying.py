"""`make deploy` puts deployments on a server, keeps people's changes, and names the missing password or server."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.campaigns.campaigns import wait_until
from support.campaigns.deployed import Site

from flows.deployment.deploy import ALERTS, automations

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that wants a password, with everything deployed and no worker."""
    site = Site(tmp_path_factory.mktemp("site"), password="a secret")
    with site.server():
        with site.worker() as terminal:
            assert f"at {site.url}/deployments\n" in terminal.output.read_text()
        yield site


@pytest.fixture
def waiting(site: Site) -> Iterator[str]:
    """A flow run of the campaign, waiting for a worker; no other one is there."""
    for run in site.flow_runs("campaign/campaign"):
        site.api.delete(f"/flow_runs/{run['id']}")
    deployment = site.deployment("campaign/campaign")
    yield site.start("campaign/campaign", deployment["parameters"])
    site.api.post(f"/deployments/{deployment['id']}/resume_deployment")


def change_automation(site: Site, name: str, **changed: Any) -> None:
    """Enables and changes an automation, as a person does on its page."""
    (stored,) = site.api.post("/automations/filter", json={"automations": {"name": {"any_": [name]}}}).json()
    site.api.patch(f"/automations/{stored['id']}", json={"enabled": True})
    if changed:
        kept = {key: stored[key] for key in ("name", "description", "trigger", "actions")}
        kept["trigger"] |= changed
        site.api.put(f"/automations/{stored['id']}", json={**kept, "enabled": True})


def emit(site: Site, kind: str, flow_run: str) -> None:
    """Emits the event as a campaign's task does."""
    deployment = site.deployment("campaign/campaign")["id"]
    related = [
        {"prefect.resource.id": f"prefect.flow-run.{flow_run}", "prefect.resource.role": "flow-run"},
        {"prefect.resource.id": f"prefect.deployment.{deployment}", "prefect.resource.role": "deployment"},
    ]
    post_event(site, kind, "millrace.run.mine", related)


def post_event(site: Site, kind: str, resource: str, related: list[dict[str, str]], **payload: Any) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    event = {"id": str(uuid.uuid4()), "occurred": now, "event": kind, "related": related, "payload": payload}
    site.api.post("/events", json=[{**event, "resource": {"prefect.resource.id": resource}}])


@pytest.mark.extended
def test_a_server_with_a_password_lets_nobody_in_without_it(site: Site) -> None:
    assert httpx.post(f"{site.url}/api/deployments/filter", json={}).status_code == httpx.codes.UNAUTHORIZED
    assert httpx.get(f"{site.url}/api/health").status_code == httpx.codes.OK
    deployed = site.api.post("/deployments/filter", json={}).json()
    names = {"campaign-from-preset", "sft", "distill", "chain", "campaign", "replay", "evaluate", "gc", "plan"}
    assert {deployment["name"] for deployment in deployed} == names


@pytest.mark.parametrize("password", [{}, {"PREFECT_API_AUTH_STRING": "admin:wrong"}])
def test_deploying_without_the_password_is_refused_in_one_sentence(
    site: Site, tmp_path: Path, password: dict[str, str]
) -> None:
    terminal = Site(tmp_path, port=site.port).make("deploy", **password)
    assert terminal.process.wait(timeout=60) == 2
    (line,) = [line for line in terminal.output.read_text().splitlines() if line.startswith("millrace:")]
    assert "PREFECT_API_AUTH_STRING" in line


def test_deploying_to_nowhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    terminal = Site(tmp_path).make("deploy")
    assert terminal.process.wait(timeout=60) == 2
    (line,) = [line for line in terminal.output.read_text().splitlines() if line.startswith("millrace:")]
    assert "PREFECT_API_URL is http://127.0.0.1:" in line


def test_the_server_listens_to_this_machine_alone(site: Site) -> None:
    # /proc/net/tcp: local address and port in hexadecimal, 0A: listening.
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [fields[1] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{site.port:04X}")] == [
        f"0100007F:{site.port:04X}"
    ]


def test_three_queues_share_the_pool_the_urgent_one_first(site: Site) -> None:
    queues = site.api.post("/work_pools/millrace/queues/filter", json={}).json()
    assert {queue["name"]: queue["priority"] for queue in queues} == {"urgent": 1, "default": 2, "idle": 3}
    assert site.api.get("/work_pools/millrace").json()["concurrency_limit"] == 1


def test_deploying_again_leaves_on_what_a_person_has_switched_on(site: Site) -> None:
    deployment = site.deployment("campaign/campaign")
    (schedule,) = deployment["schedules"]
    assert not schedule["active"]
    at = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
    site.api.patch(at, json={"active": True})
    collapsed = automations()[1].name
    change_automation(site, collapsed)
    with site.worker("CAMPAIGNS=3"):
        pass
    (again,) = site.deployment("campaign/campaign")["schedules"]
    assert (again["id"], again["active"]) == (schedule["id"], True)
    site.api.patch(at, json={"active": False})
    stored = site.api.post("/automations/filter", json={}).json()
    enabled = {automation["name"]: automation["enabled"] for automation in stored}
    assert enabled == {shipped.name: shipped.enabled or shipped.name == collapsed for shipped in automations()}
    assert site.api.get("/work_pools/millrace").json()["concurrency_limit"] == 3


@pytest.mark.parametrize(
    ("automation", "event", "times"), [(0, "millrace.stage.restarted", 3), (1, "millrace.training.collapsed", 1)]
)
def test_an_automation_cancels_the_attempt_and_pauses_its_deployment(
    site: Site, waiting: str, automation: int, event: str, times: int
) -> None:
    change_automation(site, automations()[automation].name)
    for _ in range(times - 1):
        emit(site, event, waiting)
    assert not site.deployment("campaign/campaign")["paused"]
    emit(site, event, waiting)
    wait_until(lambda: site.flow_run(waiting)["state"]["type"] in ("CANCELLED", "CANCELLING"), "the attempt to end", 60)
    wait_until(lambda: site.deployment("campaign/campaign")["paused"], "the deployment to be paused", 60)


@pytest.mark.extended
def test_a_flow_run_that_falls_silent_is_marked_crashed(site: Site, waiting: str) -> None:
    # The default is ten minutes of silence, too long for a test.
    change_automation(site, automations()[2].name, within=10)
    running = {"state": {"type": "RUNNING"}, "force": True}
    site.api.post(f"/flow_runs/{waiting}/set_state", json=running)
    post_event(site, "prefect.flow-run.heartbeat", f"prefect.flow-run.{waiting}", [])
    wait_until(lambda: site.flow_run(waiting)["state"]["type"] == "CRASHED", "the flow run to be marked", 90)


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Someone's webhook: its URL, and what it was sent."""
    received: list[dict[str, str]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(httpx.codes.NO_CONTENT)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/alert", received
        server.shutdown()


def test_an_alert_reaches_a_webhook(site: Site, webhook: tuple[str, list[dict[str, str]]]) -> None:
    url, received = webhook
    block_type = site.api.get("/block_types/slug/custom-webhook").json()
    (schema, *_) = site.api.post(
        "/block_schemas/filter", json={"block_schemas": {"block_type_id": {"any_": [block_type["id"]]}}}
    ).json()
    data = {"name": "mine", "url": url, "json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
    block = {"block_type_id": block_type["id"], "block_schema_id": schema["id"], "name": ALERTS, "data": data}
    assert site.api.post("/block_documents/", json=block).status_code == httpx.codes.CREATED
    with site.worker():
        pass
    post_event(site, "millrace.training.collapsed", "millrace.run.mine", [], sentence="reward fell to 0")
    wait_until(lambda: received, "the alert", 60)
    assert "millrace.training.collapsed" in received[0]["subject"]
    assert received[0]["body"] == "reward fell to 0"
    message = {"validated_state": {"type": "FAILED", "message": "the config has a typo"}}
    post_event(site, "prefect.flow-run.Failed", "prefect.flow-run.mine", [], **message)
    wait_until(lambda: len(received) > 1, "the second alert", 60)
    assert received[1]["body"] == "the config has a typo"
