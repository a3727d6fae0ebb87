"""Imports of each process, in real interpreters: heavy modules cost seconds and hundreds of megabytes."""

import subprocess
import sys

import pytest
from support.campaigns.campaigns import REPOSITORY

_HEAVY = ("torch", "transformers", "vllm", "prefect", "duckdb", "dash", "pydantic", "pyarrow")
_LIST = f"""
import sys
print(*(name for name in {_HEAVY} if name in sys.modules))
"""
_SCORER = """
from pathlib import Path
import millrace.stages.score
from configs.load import load_config
from millrace.rewards.scorer import make_scorer
from millrace.types import Prompt
config = load_config(Path("configs/presets/tiny-cpu.yaml"), [])
with make_scorer(config.by_source()) as scorer:
    [scored] = scorer.score_many([("default", Prompt(prompt_id="p", text="1+1=", answer="2", source="s"), "2")])
assert scored.reward == 1.0
"""
_CHECK = """
from pathlib import Path
import flows.cli.run
from configs.load import load_config
from flows.campaign.prepare import check
check(load_config(Path("configs/presets/tiny-cpu.yaml"), ["storage.root=memory://test-imports"]), "r", resume="never")
"""
_HELP = """
from flows.cli.main import main
try:
    main(["run", "--help"])
except SystemExit:
    print()
"""
_STATUS = """
from flows.cli.main import main
assert main(["status", "memory://test-imports/none"]) == 2
"""


def _imported(program: str) -> set[str]:
    """The heavy modules that this program has imported at its end."""
    ended = subprocess.run(
        [sys.executable, "-c", program + _LIST], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    )
    return set(ended.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("program", "needed"),
    [(_SCORER, {"pydantic", "pyarrow"}), (_CHECK, {"pydantic", "pyarrow"}), (_HELP, set())],
    ids=["scorer of exact match", "checks before a run", "help"],
)
def test_a_program_imports_what_it_needs(program: str, needed: set[str]) -> None:
    assert _imported(program) == needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("promote", {"pydantic", "pyarrow"}),
        ("sync_weights", {"pydantic", "pyarrow", "torch"}),
        ("generate", {"pydantic", "pyarrow", "torch", "transformers"}),
        ("train.main", {"pydantic", "pyarrow", "torch", "transformers"}),
        ("evaluate", {"pydantic", "pyarrow", "torch", "transformers"}),
        ("bootstrap", {"pydantic", "pyarrow", "torch", "transformers"}),
    ],
)
def test_a_stage_imports_what_it_needs(stage: str, needed: set[str]) -> None:
    assert _imported(f"import millrace.stages.{stage}") == needed


def test_status_does_not_import_prefect() -> None:
    assert not _imported(_STATUS) & {"prefect", "torch", "transformers", "duckdb"}
