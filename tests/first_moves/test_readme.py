"""Every command of the README works in a fresh install."""

import json
import re
from collections.abc import Callable

import pytest
from support.campaigns.first_moves import ROOT, SHORT, Checkout, wait_for_page

ELSEWHERE = {"make test", "make docs", "make vllm", "make faults"}
"""`make test` and `make docs` run in CI and `make faults` takes hours; `make smollm` includes `make vllm`."""


def commands() -> list[str]:
    """The README's commands, from its code blocks and its running text, in order, each once."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    plain = [" ".join(line.split("  #")[0].split()) for line in lines + spans]
    found = [re.sub(r"^\.venv/bin/", "", line) for line in plain]
    return list(dict.fromkeys(line for line in found if re.match(r"(make|millrace) ", line)))


@pytest.fixture(scope="module")
def mine(checkout: Checkout, exported: str) -> str:
    """The run of the README's own model and prompts, in a few steps."""
    questions = [{"prompt": f"{a}+{a + 1}=", "answer": f"#### {2 * a + 1}"} for a in range(10, 99)]
    checkout.write("questions.jsonl", "\n".join(map(json.dumps, questions)))
    [command] = [line for line in commands() if "--run-id mine" in line]
    own = command.replace("/models/my-model", exported).replace("max_new_tokens=256", "max_new_tokens=8")
    checkout.run(f"{own} {SHORT}").succeeded()
    return "runs/mine"


def _works(command: str) -> Callable[[Checkout, str], object]:
    return lambda checkout, demo: checkout.run(command.format(demo=demo)).succeeded()


def _serves_a_dashboard(checkout: Checkout, demo: str) -> None:
    with checkout.running("millrace dashboard") as server:
        wait_for_page("http://127.0.0.1:8050/", server)


def _serves_prefect(checkout: Checkout, demo: str) -> None:
    # In a terminal, where Prefect's own command would ask questions.
    with checkout.running("script -qec 'make server' /dev/null") as server:
        wait_for_page("http://127.0.0.1:4200/api/health", server)


def _deploys(checkout: Checkout, demo: str) -> None:
    with checkout.running("script -qec 'make server PORT=4300' /dev/null") as server:
        wait_for_page("http://127.0.0.1:4300/api/health", server)
        with checkout.running("make deploy PORT=4300") as worker:
            assert worker.stdout is not None
            assert any("campaign-from-preset" in line for line in worker.stdout)


def _finds_no_gpu(command: str) -> Callable[[Checkout, str], object]:
    def finds_none(checkout: Checkout, demo: str) -> None:
        ended = checkout.run(command)
        assert ended.code == 2
        assert "Traceback" not in ended.output

    return finds_none


def _installs(command: str) -> Callable[[Checkout, str], object]:
    return lambda checkout, demo: checkout.run(command, installs=True).succeeded()


RUN_AS = {
    "make demo": _works("test -e {demo}/summary.json"),
    "millrace doctor": _works("millrace doctor"),
    "millrace init questions.jsonl --model /models/my-model": _works("millrace init questions.jsonl --model my-model"),
    "millrace export": _works("millrace export {demo} --to exported-as-in-readme"),
    "make gpu-check": _finds_no_gpu("make gpu-check"),
    "make gpu": _finds_no_gpu("make gpu"),
    "make server": _serves_prefect,
    "make deploy": _deploys,
    "millrace dashboard": _serves_a_dashboard,
    "millrace show runs/mine --step 40": _works("millrace show runs/mine --step 2"),
    # Last, because they add packages to the environment.
    "make smollm": _installs("make smollm"),
    "millrace run configs/presets/smollm2-cpu.yaml": _works(
        "millrace run configs/presets/smollm2-cpu.yaml --set training.max_steps=1 prompts.num_eval=8 "
        "training.groups_per_step=2 generation.groups_per_batch=2"
    ),
}
"""README command → what runs in its place; the others run as they are."""


def _in_order() -> list[str]:
    last = [command for command in commands() if "smollm" in command]
    return [command for command in commands() if command not in last and command not in ELSEWHERE] + last


@pytest.mark.parametrize("command", _in_order())
def test_a_command_of_the_readme_works(checkout: Checkout, demo: str, mine: str, command: str) -> None:
    if "--run-id mine" not in command:
        RUN_AS.get(command, _works(command))(checkout, demo)


def test_commands_that_run_as_others_are_in_the_readme() -> None:
    assert set(RUN_AS) | ELSEWHERE <= set(commands())
