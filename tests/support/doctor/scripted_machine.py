"""A machine that answers a diagnosis as its test says; by default it can run campaigns, and has no GPU."""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.doctor.machine import Machine, TorchDevices

TWO_GPUS = "NVIDIA H100, 81559 MiB, 580.1\nNVIDIA H100, 81559 MiB, 580.1\n"
TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \t{link}\tPXB\t0-47
GPU1\t{link}\t X \tSYS\t0-47
NIC0\tPXB\tSYS\t X
"""


@dataclass
class ScriptedMachine(Machine):
    """Each field is an answer."""

    variables: dict[str, str] = field(default_factory=dict)
    interpreter: tuple[int, int, int] = (3, 12, 1)
    memory: int = 8 << 30
    rooms: dict[str, int] = field(default_factory=dict)
    """Free bytes by folder; 100 GiB elsewhere."""
    writable_shared_memory: bool = True
    files: int = 4096
    libraries: bool = True
    packages: dict[str, str] = field(default_factory=lambda: {"torch": "2.13.0+cpu", "prefect": "3.7.7"})
    required: tuple[str, ...] = ("torch>=2.13", "prefect>=3.7,<3.7.8", 'peft; extra == "lora"')
    printed: dict[str, str] = field(default_factory=dict)
    """What commands print, by their name and first argument."""
    taken_ports: frozenset[int] = frozenset()
    servers: frozenset[str] = frozenset()
    """URLs at which a Prefect server answers."""
    bfloat16: str | None = "avx512_bf16"
    devices: TorchDevices | None = None
    """None: torch must not be asked."""

    def environment(self, name: str) -> str:
        return self.variables.get(name, "")

    def python(self) -> tuple[int, int, int]:
        return self.interpreter

    def cores(self) -> int:
        return 2

    def multiplies_bfloat16(self) -> str | None:
        return self.bfloat16

    def available_memory(self) -> int:
        return self.memory

    def room(self, folder: Path) -> int:
        return self.rooms.get(str(folder), 100 << 30)

    def is_writable(self, folder: Path) -> bool:
        return self.writable_shared_memory

    def open_files(self) -> int:
        return self.files

    def has_library(self, name: str) -> bool:
        return self.libraries

    def installed(self, package: str) -> str | None:
        return self.packages.get(package)

    def requirements(self) -> list[str]:
        return list(self.required)

    def run(self, *command: str) -> str | None:
        return next((text for start, text in self.printed.items() if " ".join(command).startswith(start)), None)

    def has_command(self, name: str) -> bool:
        return any(start.startswith(name) for start in self.printed)

    def names_in(self, folder: Path) -> list[str]:
        return []

    def can_listen(self, port: int) -> bool:
        return port not in self.taken_ports

    def answers(self, url: str) -> bool:
        return url in self.servers

    def torch_devices(self) -> TorchDevices:
        assert self.devices is not None, "importing torch takes seconds"
        return self.devices


def with_two_gpus(link: str, **answers: object) -> ScriptedMachine:
    """Two GPUs joined by `link`, in the words of nvidia-smi, and a torch that can use them."""
    machine = ScriptedMachine(
        printed={"nvidia-smi --query-gpu": TWO_GPUS, "nvidia-smi topo": TOPOLOGY.format(link=link)},
        packages={"torch": "2.13.0", "prefect": "3.7.7", "vllm": "0.32.0"},
        devices=TorchDevices(names=("NVIDIA H100",) * 2, peers=((0, 1), (1, 0)), nccl="2.28.3"),
    )
    for name, value in answers.items():
        setattr(machine, name, value)
    return machine
