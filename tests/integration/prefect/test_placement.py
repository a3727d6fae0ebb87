"""Stages in a work pool: its worker starts them, here on the controller's machine, and they are not its children."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced, send, stages_of, start_model, wait_until
from support.campaigns.prefect_server import find, num_workers, prefect_client

pytestmark = pytest.mark.campaign

PLACED = {
    "placement.generate.work_pool": "hosts",
    "placement.train.work_pool": "hosts",
    "weights.transport": "store",
}


@pytest.fixture(scope="module")
def worker(
    module_millrace: Millrace, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """`make host POOL=hosts`."""
    with (tmp_path_factory.mktemp("worker") / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.deployment.deploy", "--host", "hosts"],
            cwd=REPOSITORY,
            env={**module_millrace.environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
            stdout=log,
            stderr=log,
        )
    wait_for_worker(prefect_api, "hosts")
    yield process
    process.terminate()
    process.wait(timeout=90)


def wait_for_worker(prefect_api: str, pool: str) -> None:
    with prefect_client(prefect_api) as client:
        wait_until(lambda: num_workers(client, pool) > 0, "a worker of the pool to be online")


@pytest.mark.extended
def test_stages_of_a_pool_are_watched_restarted_and_drained_at_the_end(
    millrace: Millrace, worker: subprocess.Popen[bytes], prefect_api: str
) -> None:
    run_url = millrace.root / "placed"
    # Too long to end before the signal, however fast the machine is.
    controller = millrace.start(*millrace.campaign("placed", **PLACED, **{"training.max_steps": 100_000}))
    millrace.wait_for_version("placed", 2, 300)
    (generator,) = (stage for stage in stages_of(run_url) if "millrace.stages.generate" in stage.cmdline())
    (trainer,) = (stage for stage in stages_of(run_url) if "millrace.stages.train.main" in stage.cmdline())
    flow_run = generator.parent()
    assert flow_run is not None
    assert controller.pid not in {parent.pid for parent in generator.parents()}
    assert worker.pid in {parent.pid for parent in generator.parents()}
    flow_run.kill()
    wait_until(
        lambda: millrace.status_record("placed", "generate-0").get("pid") != generator.pid,
        "the generator to be started again",
        300,
    )
    # More than the old generator's rollouts can have been enough for.
    millrace.wait_for_version("placed", millrace.version("placed") + 5, 300)
    ended = send(controller, signal.SIGTERM)
    assert ended.code == 143, ended.output
    stopped = millrace.status("placed")
    assert stopped["state"] == "stopped"
    assert_balanced(stopped)
    assert millrace.status_record("placed", "train-0")["pid"] == trainer.pid, "no other stage was started again"
    assert stages_of(run_url) == []
    runs = find(prefect_api, "flow_runs", flows={"name": {"any_": ["stages"]}})
    states = {(run["name"], run["state"]["type"]) for run in runs}
    # The worker says that it crashed, unless the campaign gives it up first, because it is silent.
    killed = states & {("generate-0 of placed", state) for state in ("CRASHED", "CANCELLED")}
    assert len(runs) == 3
    assert len(killed) == 1
    assert states - killed == {("generate-0 of placed", "COMPLETED"), ("train-0 of placed", "COMPLETED")}


@pytest.mark.vllm
def test_a_host_checks_the_vllm_of_its_generator(millrace: Millrace, worker: subprocess.Popen[bytes]) -> None:
    wrong = {"generation.engine": "vllm", "generation.engine_args.max_modellen": 64}
    line = millrace.run(*millrace.campaign("wrong", **PLACED, **wrong)).expect_refusal()
    assert line.startswith("millrace: generate-0 of work pool hosts on ")
    assert "generation.engine_args.max_modellen is no argument of vLLM" in line
    assert stages_of(millrace.root / "wrong") == []


@pytest.mark.extended
def test_a_campaign_whose_hosts_alone_have_the_model(millrace: Millrace, prefect_api: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "model").symlink_to(start_model())
    everywhere = {f"placement.{stage}.work_pool": "homes" for stage in ("generate", "score", "train", "evaluate")}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.deployment.deploy", "--host", "homes"],
        cwd=REPOSITORY,
        env={**millrace.environment, "HOME": str(home), "PREFECT_WORKER_QUERY_SECONDS": "1"},
    )
    try:
        wait_for_worker(prefect_api, "homes")
        settings = {**everywhere, "weights.transport": "store", "model.path": "~/model", "promotion.margin": 0.0}
        summary = millrace.finish("homes", **settings)
    finally:
        process.terminate()
        process.wait(timeout=90)
    assert (summary["state"], summary["eval"]["end"]["policy_version"]) == ("finished", summary["max_steps"])


@pytest.mark.faults
def test_a_host_with_other_code_is_named_and_the_campaign_ends(
    millrace: Millrace, worker: subprocess.Popen[bytes], tmp_path: Path, prefect_api: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, elsewhere], check=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "other"]
    subprocess.run(["git", *commit], cwd=elsewhere, check=True)
    other = subprocess.Popen(
        [sys.executable, "-m", "flows.deployment.deploy", "--host", "others"],
        cwd=elsewhere,
        env={**millrace.environment, "PYTHONPATH": str(elsewhere), "PREFECT_WORKER_QUERY_SECONDS": "1"},
    )
    try:
        wait_for_worker(prefect_api, "others")
        ended = millrace.run(*millrace.campaign("other", **{**PLACED, "placement.generate.work_pool": "others"}))
    finally:
        other.terminate()
        other.wait(timeout=90)
    line = ended.expect_refusal()
    assert line.startswith("millrace: generate-0 of work pool others on ")
    assert "expected the same code on every host" in line
    assert stages_of(millrace.root / "other") == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"placement.score.work_pool": "nowhere"}, "placement.score.work_pool is 'nowhere', but the Prefect server at"),
        ({"placement.train.work_pool": "idle", "weights.transport": "store"}, "no deployment stages/idle"),
        (
            {"placement.generate.work_pool": "hosts", "weights.transport": "shm"},
            'weights.transport is "shm" and placement.generate.work_pool',
        ),
    ],
)
def test_a_pool_that_cannot_run_stages_is_refused(
    millrace: Millrace, prefect_api: str, settings: dict[str, str], sentence: str
) -> None:
    if not find(prefect_api, "work_pools", work_pools={"name": {"any_": ["idle"]}}):
        with prefect_client(prefect_api) as client:
            client.post("/work_pools/", json={"name": "idle", "type": "process"})
    assert sentence in millrace.run(*millrace.campaign("refused", **settings)).expect_refusal()
    assert not (millrace.root / "refused").exists()


def test_variables_that_the_pools_jobs_do_not_have_are_refused(
    millrace: Millrace, worker: subprocess.Popen[bytes]
) -> None:
    variables = {"placement.score.work_pool": "hosts", "placement.score.job_variables.stream_output": 3}
    line = millrace.run(*millrace.campaign("gpus", **variables)).expect_refusal()
    assert "placement.score.work_pool is 'hosts', but that pool does not take its job_variables: " in line
    assert not (millrace.root / "gpus").exists()


def test_placement_without_a_server_is_refused(millrace_alone: Millrace) -> None:
    arguments = millrace_alone.campaign("alone", **{"placement.score.work_pool": "hosts"})
    assert "PREFECT_API_URL is not set" in millrace_alone.run(*arguments).expect_refusal()
