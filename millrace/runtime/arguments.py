"""The command line of a stage process, and the config of its attempt."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from configs.schema import RunConfig
from millrace.runs.record import Attempt
from storage.errors import StreamCorrupt
from storage.json_text import RESTORE

EVALUATE_BESIDE, EVALUATE_AT_END = 0, 1
"""Replicas of the evaluate stage: during training, and at the end of an attempt."""


@dataclass(frozen=True, kw_only=True)
class StageArguments:
    """The command line of a stage. It reads everything else from the run."""

    run_url: str
    attempt: int
    """Number of the attempt, whose stored config the stage follows."""
    replica: int
    handover: Path
    """Folder in shared memory for the weights that this attempt's processes exchange."""
    devices: tuple[str, ...] = ()
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them; none if it was assigned none."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}

    def as_argv(self) -> list[str]:
        """The command line that `parse` reads."""
        values = {**vars(self), "devices": ",".join(self.devices)}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]

    @classmethod
    def parse(cls, argv: list[str]) -> Self:
        """Parses a command line; exits with code 2 if it is invalid."""
        parser = argparse.ArgumentParser()
        for name, kind in (("--run-url", str), ("--attempt", int), ("--replica", int), ("--handover", Path)):
            parser.add_argument(name, required=True, type=kind)
        parser.add_argument("--devices", default=(), type=lambda names: tuple(filter(None, names.split(","))))
        return cls(**vars(parser.parse_args(argv)))


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one trainer, as the launcher of each gets them on its command line."""

    run_url: str
    attempt: int
    host: int
    """This host, in [0, hosts); host 0 leads."""
    hosts: int
    min_hosts: int
    """With how many to start while others are missing, in [1, hosts]."""
    join_seconds: float
    """How long to wait for the missing ones before that."""
    network: str
    """In which they reach each other, such as 10.0.0.0/24."""
    ranks: int
    """Ranks of each host."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def attempt_config(attempt: Attempt) -> RunConfig:
    """Parses the config that the attempt was started with. Raises StreamCorrupt for an invalid one."""
    try:
        return RunConfig.model_validate(attempt.config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its config"
        reason = f"not a config of this version of Millrace: {key}: {first['msg']}; {RESTORE}"
        raise StreamCorrupt(attempt.path, reason) from error
