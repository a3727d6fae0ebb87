"""The four stages that run as long as the campaign does, each a Prefect task, by name."""

from typing import Any

from prefect import Task

from millrace.places import StageName
from tasks.generate import generate
from tasks.score import score
from tasks.sync_weights import sync_weights
from tasks.train import train

LONG_RUNNING: dict[StageName, Task[..., Any]] = {
    "train": train,
    "sync_weights": sync_weights,
    "generate": generate,
    "score": score,
}
