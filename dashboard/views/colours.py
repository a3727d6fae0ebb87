"""Data colours: one per meaning, readable on white and near-black, distinct for colour-blind readers (Okabe and Ito).

Text, axes and grid get their colours from the page's style, light or dark.
"""

from collections.abc import Mapping

BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#c98500"
PINK, SKY, VIOLET, OLIVE = "#c0679a", "#2f9bd8", "#7b68c8", "#9a8500"
BROWN, TEAL, GREY = "#a65628", "#4f8a8b", "#808080"

SEQUENCE = (BLUE, VERMILION, GREEN, PINK, "#8a78f2", "#507231", "#9f05f5", "#fd1458")
"""For things identified only by a number: runs, generators. Any two differ by a ΔE of 16 at least, also to a reader who
lacks one kind of cones; on white and on the dark card each has a contrast of 3."""

MEANINGS: Mapping[str, str] = {
    # Outcomes.
    "trained": BLUE,
    "stale": VERMILION,
    "error": ORANGE,
    "corrupt": PINK,
    "rolled_back": GREY,
    "zero_advantage": SKY,
    "truncated": VIOLET,
    # Stages, and each stage's main work.
    "generate": BLUE,
    "score": ORANGE,
    "train": GREEN,
    "sync_weights": PINK,
    "sync": PINK,
    # A stage's other work.
    "paused for weights": VERMILION,
    "commit": SKY,
    "checkpoint": VIOLET,
    "handover": OLIVE,
    "probe": BROWN,
    "store unfinished responses": PINK,
    "loading": TEAL,
    "serve the late": "#6e5bbe",
    # What runs beside the pipeline now and then.
    "bootstrap": BROWN,
    "evaluate": VIOLET,
    # Waiting is grey, with a tint of the stage that waits.
    "waiting for scored groups": "#7e9a8c",
    "waiting for groups that the step would leave too old": "#6f8f9f",
    "waiting for weights": "#8a8fa3",
    "waiting for room under max_staleness": "#6f7896",
    "waiting for trajectories": "#9c8f7e",
    "waiting for a new policy version": "#a08a95",
    # Transports.
    "shm": BLUE,
    "direct": GREEN,
    "store": ORANGE,
    # Parts of the staleness.
    "in flight": SKY,
    "in queues": ORANGE,
}

SCALE = ((0.0, "#2a6fb0"), (0.5, "#c0679a"), (1.0, "#f0a030"))
"""Of a heat map, from few to many."""


def colour_of(meaning: str) -> str:
    return MEANINGS.get(meaning, GREY)


def colour_number(number: int) -> str:
    """The colour for this number, from 0; colours repeat."""
    return SEQUENCE[number % len(SEQUENCE)]
