"""The command line of a stage process: written by its supervisor, read by the stage."""

import argparse
from dataclasses import dataclass
from pathlib import Path

EVALUATE_BESIDE, EVALUATE_AT_END = 0, 1
"""Replicas of the evaluate stage: beside training, and at the end of an attempt."""


@dataclass(frozen=True, kw_only=True)
class StageArguments:
    """What a stage reads from its command line. It reads everything else from the run."""

    run_url: str
    attempt: int
    """Number of the attempt, whose stored config the stage follows."""
    replica: int
    handover: Path
    """Folder in shared memory for the weights that this attempt's processes exchange."""

    def as_argv(self) -> list[str]:
        """The command line that `parse` reads."""
        return [
            "--run-url", self.run_url, "--attempt", str(self.attempt),
            "--replica", str(self.replica), "--handover", str(self.handover),
        ]  # fmt: skip

    @classmethod
    def parse(cls, argv: list[str]) -> "StageArguments":
        """Parses a command line; exits with code 2 if it is invalid."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--run-url", required=True)
        parser.add_argument("--attempt", type=int, required=True)
        parser.add_argument("--replica", type=int, required=True)
        parser.add_argument("--handover", type=Path, required=True)
        return cls(**vars(parser.parse_args(argv)))
