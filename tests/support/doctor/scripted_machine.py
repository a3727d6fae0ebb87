"""Machines for a diagnosis: by default one that can run campaigns, without a GPU."""

from pathlib import Path
from typing import Any

from millrace.doctor.machine import Machine, TorchDevices

GIB = 2**30
_FACTS = {
    "python": (3, 12, 1),
    "cores": 2,
    "bfloat16": "avx512_bf16",
    "memory": 8 * GIB,
    "shared_memory": 8 * GIB,
    "open_files": 4096,
    "has_seccomp": True,
    "requirements": ("torch>=2.13", "prefect>=3.7,<3.7.8", 'peft; extra == "lora"'),
    "packages": {"torch": "2.13.0+cpu", "prefect": "3.7.7"},
    "run_folder": Path("/data"),
    "run_space": 100 * GIB,
    "temporary_space": 100 * GIB,
    "store_error": None,
    "free_ports": frozenset({0, 4200, 8050}),
    "prefect_url": "",
    "prefect_servers": frozenset(),
    "compiler": None,
    "has_python_header": False,
    "nvcc": None,
    "locked_memory": 8 << 20,
    "has_infiniband": False,
    "has_nvidia_smi": False,
    "gpus": (),
    "torch_devices": None,
}


def scripted_machine(**changes: Any) -> Machine:
    """A machine of these facts, which are read from nowhere."""
    machine = Machine("/data/runs")
    vars(machine).update({**_FACTS, **changes})
    return machine


def with_two_gpus(**changes: Any) -> Machine:
    """Two GPUs, and a torch that can use them."""
    facts: dict[str, Any] = {
        "compiler": "/usr/bin/gcc",
        "has_python_header": True,
        "has_nvidia_smi": True,
        "gpus": ("NVIDIA H100, 81559 MiB, 580.65.06",) * 2,
        "packages": {"torch": "2.13.0", "prefect": "3.7.7", "vllm": "0.32.0"},
        "torch_devices": TorchDevices(num_gpus=2, num_peers=2, nccl="2.28.3", cuda="13.0"),
    }
    return scripted_machine(**{**facts, **changes})
