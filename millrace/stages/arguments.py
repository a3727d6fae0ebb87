"""The command line of a stage process: written by its supervisor, read by the stage."""

import argparse
from dataclasses import dataclass
from pathlib import Path

EVALUATE_START, EVALUATE_LATEST = 0, 1
"""Replicas of the evaluate stage: of the base model, of the latest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StageArguments:
    """What a supervisor tells a stage on its command line; everything else is in the run."""

    run_url: str
    attempt: int
    """Which start of the run's controller this is; its config is the one to follow."""
    replica: int
    handover: Path
    """Folder in shared memory where this attempt's weights pass from process to process."""

    def as_argv(self) -> list[str]:
        """The command line that `parse` reads."""
        return [
            "--run-url", self.run_url, "--attempt", str(self.attempt),
            "--replica", str(self.replica), "--handover", str(self.handover),
        ]  # fmt: skip

    @classmethod
    def parse(cls, argv: list[str]) -> "StageArguments":
        """Reads a command line; exits with 2 where it is not one."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--run-url", required=True)
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--replica", type=int, required=True)
        parser.add_argument("--handover", type=Path, required=True)
        return cls(**vars(parser.parse_args(argv)))
