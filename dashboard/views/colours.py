"""Data colours: one per meaning, legible on white and near-black.

Colours that are adjacent in a chart differ by a ΔE of at least 10, even for readers with colour blindness. Most are
close to those of Okabe and Ito.

Text, axes and grid get their colours from the page's style, light or dark.
"""

from collections.abc import Mapping

BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#c75710", "#009e73", "#c98500"
PINK, SKY, VIOLET, OLIVE = "#b86aa1", "#1b9ad8", "#9878ee", "#928102"
BROWN, GREY = "#ac5e36", "#858281"

SEQUENCE = (BLUE, "#d55e00", GREEN, "#c0679a", "#8a78f2", "#507231", "#9f05f5", "#fd1458")
"""Colours for numbered things such as runs and generators, with a contrast of 3 on light and dark backgrounds."""

_DEVICE = "#58626a"

MEANINGS: Mapping[str, str] = {
    # Outcomes.
    "trained": BLUE,
    "stale": VERMILION,
    "error": ORANGE,
    "corrupt": PINK,
    "rolled_back": GREY,
    "zero_advantage": SKY,
    "truncated": VIOLET,
    # Stages, and the other work of each in a tint of its colour.
    "generate": BLUE,
    "commit": SKY,
    "loading": "#7fb8dc",
    "store unfinished responses": "#0b4f7a",
    "score": ORANGE,
    "teach": OLIVE,
    "train": GREEN,
    "compile": "#9fb89a",
    "checkpoint": "#6fcfb0",
    "handover": "#04664c",
    "probe": "#a8dccb",
    "sync_weights": VIOLET,
    "sync": VIOLET,
    "paused for weights": "#c3b1f5",
    "store for late generators": "#6446c0",
    "sleep": "#c9c5be",
    "wake": "#4d4a46",
    # Occasional stages outside the pipeline.
    "bootstrap": BROWN,
    "evaluate": "#5b6b8c",
    # Waiting is grey, some with a tint.
    "waiting for scored groups": "#6d675f",
    "waiting for groups that the step would leave too old": "#728fa0",
    "waiting for weights": "#8f8c95",
    "waiting for room under max_staleness": "#707c92",
    "waiting for the trainer to give the device back": _DEVICE,
    "waiting for generators to give the device back": _DEVICE,
    "waiting for trajectories": "#8f8374",
    "waiting for a new policy version": "#9f858b",
    # Transports.
    "shm": BLUE,
    "direct": GREEN,
    "store": ORANGE,
    # Parts of the staleness.
    "in flight": SKY,
    "in queues": ORANGE,
}

SCALE = ((0.0, "#2a6fb0"), (0.5, "#c0679a"), (1.0, "#f0a030"))
"""Colours of a heat map, from few to many."""


def colour_of(meaning: str) -> str:
    return MEANINGS.get(meaning, GREY)


def colour_number(number: int) -> str:
    """Returns the colour for a number from 0; colours repeat."""
    return SEQUENCE[number % len(SEQUENCE)]
