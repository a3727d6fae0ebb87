"""The pins for GPUs are those of the tested set, and more."""

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in map(Requirement, lines)}


def test_packages_in_both_files_have_the_same_version() -> None:
    tested, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    shared = tested.keys() & gpu.keys()
    assert {name: gpu[name] for name in shared} == {name: tested[name] for name in shared}
    assert {"torch", "transformers", "prefect"} <= shared
    assert {"vllm", "nvidia-nccl-cu13"} <= gpu.keys() - shared
