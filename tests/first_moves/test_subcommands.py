"""Every subcommand that `millrace --help` lists works on the demo's run in a fresh install."""

import re

import pytest
from support.campaigns.first_moves import SHORT, Checkout, wait_for_page

ARGUMENTS = {
    "run": f"configs/presets/tiny-cpu.yaml --run-id resumed --set model.path={{exported}} {SHORT}",
    "sft": f"configs/presets/tiny-cpu.yaml --from {{demo}} --run-id tuned --set model.path={{exported}} {SHORT}",
    "profile": f"configs/presets/tiny-cpu.yaml --steps 1 --set model.path={{exported}} {SHORT}",
    "status": "{demo}",
    "runs": "",
    "note": "{demo} 'my first run'",
    "doctor": "",
    "init": "sums.jsonl --model {exported}",
    "import": "{exported} --to imported",
    "replay": "{demo} --verify",
    "show": "{demo} --step 2",
    "diff": "{demo} {demo}",
    "inspect": "{demo}",
    "fsck": "{demo}",
    "compact": "{demo}",
    "gc": "{demo} --dry-run",
    "export": "{demo} --to exported-again",
}
SERVED = {"dashboard"}
NEEDS_AN_EXTRA = {"mirror", "plan"}


def test_every_subcommand_is_tried(checkout: Checkout) -> None:
    text = checkout.millrace("--help").succeeded()
    [listed] = re.findall(r"\{(.+?)\}", text)[:1]
    assert set(listed.split(",")) == ARGUMENTS.keys() | SERVED | NEEDS_AN_EXTRA


@pytest.mark.parametrize("subcommand", ARGUMENTS)
def test_a_subcommand_works(checkout: Checkout, demo: str, exported: str, subcommand: str) -> None:
    checkout.write("sums.jsonl", '{"prompt": "2+3=", "answer": "5"}')
    arguments = ARGUMENTS[subcommand].format(demo=demo, exported=exported)
    checkout.millrace(f"{subcommand} {arguments}").succeeded()


def test_the_dashboard_serves_the_run(checkout: Checkout, demo: str) -> None:
    with checkout.running("millrace dashboard runs --port 8055") as server:
        wait_for_page("http://127.0.0.1:8055/", server)
