"""Which stage is killed at which place: a seeded draw that covers every place before it repeats one."""

import itertools
import random
from collections.abc import Iterator

_TRAJECTORIES, _SCORES = "streams/trajectories/0", "streams/scores/*"

PLACES: dict[str, list[str]] = {
    "generate-0": [
        "weights.mid_hash",
        "generate.before_commit",
        "generate.before_acknowledgement",
        f"put.before:{_TRAJECTORIES}/seg/*",
        f"put.mid:{_TRAJECTORIES}/seg/*",
        f"put.after:{_TRAJECTORIES}/seg/*",
        f"put.mid:{_TRAJECTORIES}/log/*",
        f"put.after:{_TRAJECTORIES}/log/*",
        "put.after:progress/generate-0.json",
    ],
    "score-0": [
        "score.before_commit",
        f"put.before:{_SCORES}/seg/*",
        f"put.mid:{_SCORES}/seg/*",
        f"put.after:{_SCORES}/seg/*",
        f"put.mid:{_SCORES}/log/*",
        f"put.after:{_SCORES}/log/*",
    ],
    "train-0": [
        "train.mid_step",
        "train.before_handover",
        "weights.mid_copy:handover",
        "train.after_handover",
        "put.before:checkpoints/data/*",
        "put.mid:checkpoints/data/*",
        "put.after:checkpoints/data/*",
        "put.mid:checkpoints/log/*",
        "put.after:checkpoints/log/*",
    ],
    "sync_weights-0": [
        "sync_weights.before_push",
        "weights.mid_hash",
        "sync_weights.after_push",
        "sync_weights.awaiting_acknowledgement",
        "put.mid:streams/metrics/sync_weights-0/log/*",
        "put.mid:progress/sync_weights-0.json",
    ],
    "controller": [
        "controller.prepared",
        "controller.bootstrapped",
        "controller.started",
        "controller.trained",
        "controller.evaluated",
        "controller.summarised",
        "put.mid:run.json",
        "put.after:run.json",
    ],
}
"""Where each process of a campaign may be killed, as failpoints name it."""

_KILLS = {"controller": 1}
"""A stage is killed twice a campaign: the third death within a minute would end it."""


def campaigns(seed: int) -> Iterator[list[str]]:
    """Endless: the failpoints of one campaign after the other."""
    chooser = random.Random(seed)
    drawn = {process: _shuffled_for_ever(places, chooser) for process, places in PLACES.items()}
    while True:
        yield [
            f"{process} {place} {1 if process == 'controller' else chooser.randint(1, 3)} kill"
            for process, places in drawn.items()
            for place in itertools.islice(places, _KILLS.get(process, 2))
        ]


def _shuffled_for_ever(places: list[str], chooser: random.Random) -> Iterator[str]:
    while True:
        yield from chooser.sample(places, len(places))
