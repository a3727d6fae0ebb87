"""Colours that stand beside each other are told apart, by every reader, and each is seen on both cards."""

import re
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from support.campaigns.campaigns import REPOSITORY

from dashboard.views import learning, rewards
from dashboard.views.colours import BLUE, GREY, ORANGE, SEQUENCE, SKY, VERMILION, colour_of

CONES = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""What readers who lack one kind of cones see of linear sRGB (Machado, Oliveira and Fernandes 2009)."""
APART = 10.0
"""ΔE of 1976: the distance in Lab."""
TURNS = ("sleep", "wake")
MEANINGS = {
    "outcomes": ("trained", "stale", "error", "corrupt", "rolled_back", "zero_advantage", "truncated"),
    "stages": ("generate", "score", "train", "sync_weights"),
    "transports": ("shm", "direct", "store"),
    "parts of the staleness": ("in flight", "in queues"),
    "a generator's time": (
        *("generate", "commit", "paused for weights", "probe", "store unfinished responses", "loading", *TURNS),
        *("waiting for weights", "waiting for room under max_staleness"),
        "waiting for the trainer to give the device back",
    ),
    "the trainer's time": (
        *("train", "handover", "checkpoint", "loading", *TURNS, "waiting for scored groups"),
        "waiting for groups that the step would leave too old",
        "waiting for generators to give the device back",
    ),
    "a scorer's time": ("score", "commit", "loading", "waiting for trajectories"),
    "weight sync's time": ("sync", "serve the late", "loading", "waiting for a new policy version"),
}
BESIDE = {
    **{name: tuple(map(colour_of, meanings)) for name, meanings in MEANINGS.items()},
    "eight runs": SEQUENCE,
    "ratios": tuple(learning.RATIOS.values()),
    "reward spread": tuple(rewards.SPREAD.values()),
    "lengths": tuple(rewards.LENGTHS.values()),
    "reward and accuracy": (BLUE, GREY, ORANGE),
    "staleness and its bound": (BLUE, SKY, VERMILION),
}


def linear(colours: Sequence[str]) -> np.ndarray:
    values = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = rgb @ to_xyz.T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def confused(colours: Sequence[str], cones: str) -> list[tuple[str, str, float]]:
    """The pairs that a reader with these cones can't tell apart."""
    seen = lab(np.clip(linear(colours) @ np.array(CONES[cones]).T, 0, 1))
    pairs = combinations(zip(colours, seen, strict=True), 2)
    distances = [(one, other, float(np.linalg.norm(at - to))) for (one, at), (other, to) in pairs]
    return [pair for pair in distances if pair[2] < APART]


def cards() -> list[str]:
    """The grounds of charts: in light, in dark."""
    style = (REPOSITORY / "dashboard" / "assets" / "style.css").read_text()
    return re.findall(r"--card: (#[0-9a-f]{6})", style)


@pytest.mark.parametrize("chart", BESIDE)
def test_colours_beside_each_other_and_on_both_cards_are_told_apart_by_every_reader(chart: str) -> None:
    light, dark = cards()
    for cones in CONES:
        assert confused(BESIDE[chart], cones) == [], cones
        for colour in BESIDE[chart]:
            assert confused([colour, light], cones) == confused([colour, dark], cones) == [], cones
