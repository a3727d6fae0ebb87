"""Generators by vLLM where eight GPUs are counted: each process has its own, also after a restart."""

import signal

import psutil
import pytest
from support.campaigns.campaigns import Millrace, send, stages_of, wait_until

# `tests/tasks/test_start.py` holds the environments of started stages in less time.
pytestmark = [pytest.mark.campaign, pytest.mark.vllm, pytest.mark.extended]

SETTINGS = {
    "generation.engine": "vllm",
    "generation.engine_args": {"max_model_len": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26},
    "generation.replicas": 2,
    "training.max_steps": 100_000,
    # Made with heads that vLLM on a CPU computes.
    "model.path": None,
    "model.warm_start_steps": 1,
}


def visible_devices(process: psutil.Process) -> set[str | None]:
    """CUDA_VISIBLE_DEVICES of a stage and of vLLM's processes below it; some write their titles over theirs."""
    environments = [each.environ() for each in (process, *process.children(recursive=True))]
    return {environment.get("CUDA_VISIBLE_DEVICES") for environment in environments if "PATH" in environment}


def test_each_generator_and_its_engine_keep_their_own_gpu(millrace: Millrace) -> None:
    controller = millrace.start(*millrace.campaign("gpus", **SETTINGS), module="tests.support.campaigns.eight_gpus")
    names = {"generate-0": ["0"], "generate-1": ["1"]}

    def is_ready(name: str) -> bool:
        assert controller.poll() is None, controller.communicate()[0]
        return millrace.status_record("gpus", name).get("t_ready") is not None

    wait_until(lambda: all(map(is_ready, names)), "both generators to be ready", 300)
    first = millrace.status_record("gpus", "generate-1")["pid"]
    psutil.Process(first).kill()
    wait_until(
        lambda: millrace.status_record("gpus", "generate-1")["pid"] != first and is_ready("generate-1"),
        "the generator to be started again",
        300,
    )
    for name, devices in names.items():
        record = millrace.status_record("gpus", name)
        assert record["devices"] == devices
        assert visible_devices(psutil.Process(record["pid"])) == set(devices)
    assert millrace.status("gpus")["devices"] == names
    ended = send(controller, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert "generate-0 on GPU 0" in ended.output
    assert stages_of(millrace.root / "gpus") == []
