"""A seeded choice of where stages are killed. It covers every failpoint before it repeats one."""

import itertools
import random
from collections.abc import Iterator, Mapping


def _puts(path: str, *moments: str) -> list[str]:
    return [f"put.{moment}:{path}" for moment in moments]


_EACH = ("before", "mid", "after")
_TRAJECTORIES = "streams/trajectories/0"


def _annotator(stage: str, streams: str) -> list[str]:
    rows = [*_puts(f"streams/{streams}/*/seg/*", *_EACH), *_puts(f"streams/{streams}/*/log/*", "mid", "after")]
    return [f"{stage}.before_commit", *rows]


FAILPOINTS: dict[str, list[str]] = {
    "generate-0": [
        *("weights.mid_hash", "generate.before_commit", "generate.before_acknowledgement"),
        *_puts(f"{_TRAJECTORIES}/seg/*", *_EACH),
        *_puts(f"{_TRAJECTORIES}/log/*", "mid", "after"),
        *_puts("progress/generate-0.json", "after"),
    ],
    "score-0": _annotator("score", "scores"),
    "train-0": [
        *("train.mid_step", "train.before_handover", "weights.mid_copy:handover", "train.after_handover"),
        *_puts("checkpoints/data/*", *_EACH),
        *_puts("checkpoints/log/*", "mid", "after"),
    ],
    "sync_weights-0": [
        *("sync_weights.before_push", "weights.mid_hash", "sync_weights.after_push"),
        "sync_weights.awaiting_acknowledgement",
        *_puts("streams/metrics/sync_weights-0/log/*", "mid"),
        *_puts("progress/sync_weights-0.json", "mid"),
    ],
    "controller": [
        *("controller.prepared", "controller.bootstrapped", "controller.ordered_fork", "controller.forked"),
        *("controller.started", "controller.trained", "controller.evaluated", "controller.summarised"),
        *_puts("run.json", "mid", "after"),
    ],
    "fork_server": [f"fork_server.{place}" for place in ("importing", "loaded", "asked", "forked", "served")],
}
"""Failpoints at which each process of a campaign may be killed."""
OF_ANNOTATORS = {"score-0": _annotator("score", "scores"), "teach-0": _annotator("teach", "teachers")}
"""Failpoints of a campaign with a teacher at which only its annotators are killed."""
WHILE_STORING_UNFINISHED = [
    f"{when}:streams/unfinished/0/{file}/*" for when in ("put.mid", "put.after") for file in ("seg", "log")
]
"""More of generate-0's, in asynchronous campaigns."""

_KILLS = {"controller": 1, "fork_server": 1}
"""Kills per campaign, at the first pass. Other stages are killed twice: the third death within a minute would end the
campaign."""


def campaigns(seed: int, failpoints: Mapping[str, list[str]] = FAILPOINTS) -> Iterator[list[str]]:
    """Yields the failpoints of one campaign after another, without end."""
    chooser = random.Random(seed)
    drawn = {process: _shuffle_forever(points, chooser) for process, points in failpoints.items()}
    storing = itertools.cycle(WHILE_STORING_UNFINISHED)
    for number in itertools.count():
        specs = [
            f"{process} {point} {1 if process in _KILLS else chooser.randint(1, 3)} kill"
            for process, points in drawn.items()
            for point in itertools.islice(points, _KILLS.get(process, 2))
        ]
        if is_asynchronous(number) and "generate-0" in failpoints:
            # In place of one of its kills, because the third one would end the campaign.
            first = next(i for i, spec in enumerate(specs) if spec.startswith("generate-0"))
            specs[first] = f"generate-0 {next(storing)} 2 kill"
        yield specs


def is_asynchronous(number: int) -> bool:
    """Every third campaign is; the others are in sync mode, where no kill may change the final weights."""
    return number % 3 == 2


def _shuffle_forever(points: list[str], chooser: random.Random) -> Iterator[str]:
    while True:
        yield from chooser.sample(points, len(points))
