"""Learning rates in closed form, and the updates of a batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.samples import make_sample
from support.training.sharded_trainers import CASES, make_trainer, samples

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.optimizer import plan_updates, planned_rate
from millrace.training.parallel.ranks import ALONE
from millrace.training.step_report import ratio_effective_sample_size


def shares(num_steps: int, **schedule: object) -> list[float]:
    training = TrainingConfig.model_validate({"max_steps": 9, "learning_rate": 1.0, "schedule": schedule})
    return [planned_rate(training, step) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [1.0] * 5),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        (
            {"decay": "linear", "warmup_steps": 1, "steps": 5, "final_share": 0.2},
            [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        ),
    ],
    ids=["default", "warm-up", "linear decay"],
)
def test_shares_of_the_rate_follow_the_schedule(schedule: dict[str, object], expected: list[float]) -> None:
    assert shares(len(expected), **schedule) == pytest.approx(expected)


def test_a_cosine_decay_is_half_way_down_at_half_time() -> None:
    cosine = shares(12, decay="cosine", warmup_steps=2, steps=10, final_share=0.5)
    assert cosine[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert cosine[6] == pytest.approx(0.75)
    assert cosine[4] == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert cosine[10:] == [0.5, 0.5]


@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    after=st.integers(1, 30),
    final=st.floats(0, 1),
)
def test_a_rate_first_rises_then_falls_and_is_never_above_the_full_one(
    decay: str, warmup: int, after: int, final: float
) -> None:
    steps = None if decay == "constant" else warmup + after
    rates = shares(60, decay=decay, warmup_steps=warmup, steps=steps, final_share=final)
    assert all(0 < share <= 1 for share in rates[: warmup + 1])
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup] == 1.0
    assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert rates[-1] == pytest.approx(1.0 if decay == "constant" else final, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-1000, 1000))
def test_the_effective_sample_size_does_not_depend_on_the_scale(log_ratios: list[float], shift: float) -> None:
    ratio = np.exp(log_ratios)
    expected = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    shifted_N = torch.tensor(log_ratios, dtype=torch.float64) + shift
    assert ratio_effective_sample_size(shifted_N).item() == pytest.approx(expected, rel=1e-9)
    with_infinite_N = torch.cat([shifted_N, torch.tensor([math.inf, -math.inf])])
    assert ratio_effective_sample_size(with_infinite_N).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("log_ratios", [[], [math.inf, -math.inf]])
def test_without_finite_ratios_the_effective_sample_size_is_0(log_ratios: list[float]) -> None:
    assert ratio_effective_sample_size(torch.tensor(log_ratios, dtype=torch.float64)).item() == 0


def batch(sizes: list[int], trainable: set[int] | None = None) -> list[Sample]:
    """Groups of these numbers of samples; without `trainable`, all of them are."""
    return [
        make_sample([1], [1], loss_mask=trainable is None or group in trainable, group=group)
        for group, size in enumerate(sizes)
        for _ in range(size)
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_each_epoch_has_every_group_once_and_whole(sizes: list[int], minibatches: int, epochs: int, seed: int) -> None:
    samples = [*batch(sizes), *batch([1])]
    plan = plan_updates(samples, minibatches=minibatches, epochs=epochs, seed=seed, policy_version=3)
    per_epoch = len(plan) // epochs
    num_groups = len({sample.group for sample in samples})
    assert per_epoch == min(minibatches, num_groups)
    for epoch in range(epochs):
        parts = plan[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(index for part in parts for index in part) == list(range(len(samples)))
        groups = [{samples[index].group for index in part} for part in parts]
        assert sum(map(len, groups)) == num_groups
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert all(part == sorted(part) for part in parts)


def test_a_batch_in_one_part_stays_as_it_is() -> None:
    assert plan_updates(batch([2, 2]), minibatches=1, epochs=2, seed=5, policy_version=1) == [[0, 1, 2, 3]] * 2


def test_the_order_follows_from_seed_version_and_epoch() -> None:
    samples = batch([1] * 16)

    def order(seed: int, version: int) -> list[list[int]]:
        return plan_updates(samples, minibatches=4, epochs=2, seed=seed, policy_version=version)

    first = order(0, 1)
    assert order(0, 1) == first
    assert first[:4] != first[4:]
    assert order(1, 1) != first
    assert order(0, 2) != first


def test_masked_groups_are_in_no_minibatch() -> None:
    samples = batch([2, 2, 2, 2], trainable={0, 3})
    assert sorted(plan_updates(samples, minibatches=4, epochs=1, seed=0, policy_version=1)) == [[0, 1], [6, 7]]


def test_a_masked_batch_is_one_minibatch_for_the_trainer_to_refuse() -> None:
    assert plan_updates(batch([1, 1], trainable=set()), minibatches=2, epochs=1, seed=0, policy_version=1) == [[0, 1]]


@pytest.mark.parametrize("name", ["llama aipo", "qwen3 updates", "qwen3 lora"])
def test_offloaded_moments_change_no_bit(name: str) -> None:
    plain = CASES[name]
    offloaded = replace(plain, training=plain.training.model_copy(update={"optimizer_offload": True}))
    expected, trainer = make_trainer(plain, ALONE, None), make_trainer(offloaded, ALONE, None)
    for seed in range(2):
        batch = samples(5, seed=seed)
        assert trainer.step(batch).measured() == expected.step(batch).measured()
    assert trainer.state() == expected.state()
    again = make_trainer(offloaded, ALONE, None)
    again.restore(trainer.policy_version, trainer.state())
    again.sleep()
    assert again.state() == expected.state(), "it can be saved while it sleeps"
    again.wake()
    again.step(samples(5, seed=2))
    expected.step(samples(5, seed=2))
    assert again.state() == expected.state()
