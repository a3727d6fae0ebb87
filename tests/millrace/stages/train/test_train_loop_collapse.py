"""The trainer's loop when training collapses: report, stop, or roll back with a lower learning rate."""

from collections.abc import Callable

import pytest
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from millrace.errors import RolledBack, TrainingDiverged
from millrace.runs.decisions import ROLL_BACK, rate_factor, read_decisions
from millrace.stages.train.train_loop import TrainLoop
from millrace.training.trainer import Trainer
from storage.stores.memory import MemoryStore

MakeBench = Callable[..., TrainerBench]


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> MakeBench:
    """`make(on_collapse)`: a trainer in a separate store, with a checkpoint every five steps."""

    def make(on_collapse: str, too_old: str = "mask") -> TrainerBench:
        training = {"on_collapse": on_collapse, "checkpoint_every": 5}
        return TrainerBench(memory_store, make_model, training=training, staleness={"too_old": too_old})

    return make


@pytest.fixture(autouse=True)
def made_up_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the bench's trajectories are made up, far from the policy's."""
    monkeypatch.setattr("millrace.control.collapse._MOST_KL", 1e9)


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The last factor of the learning rate by the version that the step made."""
    by_version: dict[int, float] = {}
    step = Trainer.step

    def noting(self: Trainer, samples: object, factor: float = 1.0) -> object:
        by_version[self.policy_version + 1] = factor
        return step(self, samples, factor)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", noting)
    return by_version


def steps(bench: TrainerBench, first: int, last: int, rewards: list[float] | None = None) -> None:
    """Commits two groups of each version from `first` to before `last` whenever the trainer waits for them."""
    for version in range(first, last):
        bench.later(lambda version=version: commit_step(bench, version, rewards))


def commit_step(bench: TrainerBench, version: int, rewards: list[float] | None) -> None:
    for group in (2 * version, 2 * version + 1):
        bench.commit(group, [[version] * 4, [version] * 4], rewards)


BAD = [-0.2, -0.2]


def collapsing(bench: TrainerBench) -> TrainerBench:
    """Versions up to 20 earn 0.5, later ones nothing: noticed at version 25."""
    steps(bench, 0, 21)
    steps(bench, 21, 40, BAD)
    return bench


def with_rate(bench: TrainerBench, times: float) -> None:
    """The next trainer has `times` the learning rate."""
    training = bench.config.training
    changed = training.model_copy(update={"learning_rate": times * training.learning_rate})
    bench.config = bench.config.model_copy(update={"training": changed})


def rolls_back(bench: TrainerBench, version: int, factor: float, rates: tuple[float, float] | None = None) -> None:
    """Training goes back to `version`; `rates` are the good and the bad learning rate if the rate rose between them."""
    with pytest.raises(RolledBack):
        bench.train()
    decision = read_decisions(bench.store)[-1]
    assert (decision.action, decision.policy_version) == (ROLL_BACK, version)
    measured = decision.measured
    assert measured["rate_factor"] == pytest.approx(factor)
    if rates is None:
        assert measured["bad_rate"] <= measured["good_rate"]
    else:
        assert (measured["good_rate"], measured["bad_rate"]) == pytest.approx(rates)


def collapses(bench: TrainerBench) -> list[int]:
    """The last good version of each collapse that the last trainer reported."""
    return [payload["good_version"] for kind, payload in bench.stage.told if kind == "training.collapsed"]


def test_a_collapse_is_reported_and_the_run_continues_by_default(make_bench: MakeBench) -> None:
    bench = collapsing(make_bench("go_on"))
    assert bench.train() == 40
    assert collapses(bench) == [20]
    assert bench.status["collapse"].startswith("version 25: ")


def test_the_status_names_a_collapse_until_the_reward_is_back(make_bench: MakeBench) -> None:
    bench = make_bench("go_on")
    steps(bench, 0, 21)
    steps(bench, 21, 28, BAD)
    steps(bench, 28, 60)
    bench.train()
    assert len(collapses(bench)) == 1
    assert bench.status["collapse"] is None


def test_a_collapse_stops_the_run_if_configured(make_bench: MakeBench) -> None:
    bench = collapsing(make_bench("stop"))
    with pytest.raises(TrainingDiverged) as stopped:
        bench.train()
    assert "version 25" in stopped.value.read
    assert collapses(bench) == [20]


@pytest.mark.parametrize("too_old", ["mask", "keep"])
def test_a_collapse_rolls_back_to_the_checkpoint_and_its_ledger(
    make_bench: MakeBench, factors: dict[int, float], too_old: str
) -> None:
    bench = collapsing(make_bench("roll_back", too_old))
    rolls_back(bench, 20, 1 / 3)
    # The next trainer begins where the checkpoint ends. What version 20 sampled is trained once more; the rest is
    # refused, because the versions that sampled it do not exist any more.
    bench.give_up(first_group=42)
    assert bench.train() == 21
    assert bench.account.trained.rollouts == 21 * 4
    assert bench.account.dropped["rolled_back"].rollouts == 4 * 4
    commit_step(bench, 21, None)
    assert bench.train() == 22
    assert (factors[20], factors[22]) == (1.0, pytest.approx(1 / 3))
    assert rate_factor(read_decisions(bench.store), 2) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_run_rolls_back_at_most_three_times(make_bench: MakeBench, factors: dict[int, float]) -> None:
    bench = collapsing(make_bench("roll_back"))
    for count in (1, 2, 3):
        rolls_back(bench, 20, 1 / 3)
        bench.give_up(first_group=42)
        steps(bench, 21, 40, BAD)
        assert rate_factor(read_decisions(bench.store), 2 * count) == pytest.approx(1 / 3**count)
    with pytest.raises(TrainingDiverged):
        bench.train()
    assert len(read_decisions(bench.store)) == 3
    assert factors[25] == pytest.approx(1 / 27)


def test_a_rollback_undoes_a_raised_learning_rate(make_bench: MakeBench, factors: dict[int, float]) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 18)
    assert bench.train() == 18
    with_rate(bench, 10)
    steps(bench, 18, 21)
    steps(bench, 21, 40, BAD)
    rolls_back(bench, 20, 0.1, rates=(2e-4, 2e-3))
    # With that rate it collapses once more, which is then not the rate that rose.
    bench.give_up(first_group=42)
    steps(bench, 21, 40, BAD)
    rolls_back(bench, 20, 1 / 3)
    assert (factors[18], factors[23]) == (1.0, pytest.approx(0.1))
    assert rate_factor(read_decisions(bench.store), 4) == pytest.approx(1 / 30)


def test_a_warm_up_counts_as_a_rate_that_rose(make_bench: MakeBench) -> None:
    bench = make_bench("roll_back")
    training = bench.config.training
    schedule = training.schedule.model_copy(update={"warmup_steps": 49})
    bench.config = bench.config.model_copy(update={"training": training.model_copy(update={"schedule": schedule})})
    rolls_back(collapsing(bench), 20, 1 / 3, rates=(4.8e-5, 1e-4))


def test_a_collapse_is_detected_across_a_restart(make_bench: MakeBench) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 21)
    steps(bench, 21, 23, BAD)
    assert bench.train() == 23
    steps(bench, 23, 40, BAD)
    rolls_back(bench, 20, 1 / 3)


def test_a_collapsed_run_rolls_back_once_configured(make_bench: MakeBench) -> None:
    bench = collapsing(make_bench("go_on"))
    assert bench.train() == 40
    training = bench.config.training.model_copy(update={"on_collapse": "roll_back"})
    bench.config = bench.config.model_copy(update={"training": training})
    steps(bench, 40, 41, BAD)
    rolls_back(bench, 20, 1 / 3)


def test_a_checkpoint_without_collapse_measures_is_accepted(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("go_on")
    steps(bench, 0, 21)
    settle = TrainLoop._settle
    with monkeypatch.context() as earlier:
        earlier.setattr(TrainLoop, "_settle", lambda self: {k: v for k, v in settle(self).items() if k != "collapse"})
        assert bench.train() == 21
    steps(bench, 21, 40, BAD)
    assert bench.train() == 40
    assert collapses(bench) == []


def test_rewards_are_not_compared_across_a_change_of_selection(make_bench: MakeBench) -> None:
    bench = make_bench("go_on")
    steps(bench, 0, 21)
    assert bench.train() == 21
    training = bench.config.training
    selection = training.selection.model_copy(update={"drop_zero_advantage": True})
    bench.config = bench.config.model_copy(update={"training": training.model_copy(update={"selection": selection})})
    steps(bench, 21, 40, [0.0, 0.2])
    assert bench.train() == 40
    assert collapses(bench) == []


@pytest.mark.parametrize(
    ("restarts", "factor", "rates"), [(False, 1 / 3, None), (True, 0.05, (2e-4, 4e-3))], ids=["later", "first step"]
)
def test_a_step_without_finite_values_rolls_back(
    make_bench: MakeBench,
    monkeypatch: pytest.MonkeyPatch,
    restarts: bool,
    factor: float,
    rates: tuple[float, float] | None,
) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 17)
    if restarts:
        assert bench.train() == 17
        with_rate(bench, 20)
    step = Trainer.step

    def diverging(self: Trainer, samples: object, factor: float = 1.0) -> object:
        if self.policy_version == 17:
            raise TrainingDiverged("the gradient of aipo on the way to version 18 is not finite")
        return step(self, samples, factor)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", diverging)
    steps(bench, 17, 18)
    rolls_back(bench, 15, factor, rates)
