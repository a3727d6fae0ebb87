"""The trainer's loop when training collapses: told, stopped, or back to before, with a lower learning rate."""

from collections.abc import Callable

import pytest
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from millrace.errors import RolledBack, TrainingDiverged
from millrace.runs.decisions import ROLL_BACK, rate_factor, read_decisions
from millrace.stages.train.train_loop import TrainLoop
from millrace.training.trainer import Trainer
from storage.stores.memory import MemoryStore


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> Callable[..., TrainerBench]:
    """`make(on_collapse)`: a trainer in a store of its own, with a checkpoint every five steps."""

    def make(on_collapse: str) -> TrainerBench:
        return TrainerBench(memory_store, make_model, training={"on_collapse": on_collapse, "checkpoint_every": 5})

    return make


@pytest.fixture(autouse=True)
def made_up_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the bench's trajectories are made up, far from the policy's."""
    monkeypatch.setattr("millrace.control.collapse._MOST_KL", 1e9)


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What the learning rate was multiplied by in the step that made each version, the last time."""
    found: dict[int, float] = {}
    step = Trainer.step

    def noting(self: Trainer, samples: object, factor: float = 1.0) -> object:
        found[self.policy_version + 1] = factor
        return step(self, samples, factor)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", noting)
    return found


def steps(bench: TrainerBench, first: int, last: int, rewards: list[float] | None = None) -> None:
    """What the versions from `first` to before `last` sample, two groups each, once the trainer waits for it."""
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


def collapses(bench: TrainerBench) -> list[int]:
    """The good version of each that the last trainer told of."""
    return [payload["good_version"] for kind, payload in bench.stage.told if kind == "training.collapsed"]


def test_a_collapse_is_reported_and_the_run_goes_on_by_default(make_bench: Callable[..., TrainerBench]) -> None:
    bench = collapsing(make_bench("go_on"))
    assert bench.train() == 40
    assert collapses(bench) == [20]


def test_a_collapse_may_stop_the_run_with_a_sentence(make_bench: Callable[..., TrainerBench]) -> None:
    bench = collapsing(make_bench("stop"))
    with pytest.raises(TrainingDiverged, match=r"on_collapse is stop: version 25: .* the last good version was 20"):
        bench.train()


def test_a_collapse_may_go_back_to_the_checkpoint_before_it_and_the_ledger_with_it(
    make_bench: Callable[..., TrainerBench], factors: dict[int, float]
) -> None:
    bench = collapsing(make_bench("roll_back"))
    with pytest.raises(RolledBack, match=r"rolled back to version 20, learning rate × 0.333: version 25"):
        bench.train()
    assert [one.action for one in read_decisions(bench.store)] == [ROLL_BACK]
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
def test_a_trainer_that_collapses_again_after_a_rollback_goes_back_again(
    make_bench: Callable[..., TrainerBench], factors: dict[int, float]
) -> None:
    bench = collapsing(make_bench("roll_back"))
    for count in (1, 2, 3):
        with pytest.raises(RolledBack, match=r"rolled back to version 20, learning rate × 0.333: version 25"):
            bench.train()
        bench.give_up(first_group=42)
        steps(bench, 21, 40, BAD)
        assert rate_factor(read_decisions(bench.store), 2 * count) == pytest.approx(1 / 3**count)
    with pytest.raises(TrainingDiverged, match="collapsed again after 3 rollbacks: version 25"):
        bench.train()
    assert factors[25] == pytest.approx(1 / 27)


def test_a_rate_that_rose_between_two_trainers_goes_back_to_what_it_was(
    make_bench: Callable[..., TrainerBench], factors: dict[int, float]
) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 18)
    assert bench.train() == 18
    with_rate(bench, 10)
    steps(bench, 18, 21)
    steps(bench, 21, 40, BAD)
    with pytest.raises(RolledBack, match=r"to version 18, learning rate × 0.1: .* had risen from 0.0002 to 0.002"):
        bench.train()
    [decision] = read_decisions(bench.store)
    assert decision.measured == {"rate_factor": pytest.approx(0.1), "good_rate": 2e-4, "bad_rate": 2e-3}
    # With that rate it collapses once more, which is then not the rate that rose.
    bench.give_up(first_group=38)
    steps(bench, 19, 40, BAD)
    with pytest.raises(RolledBack, match=r"to version 18, learning rate × 0.333: version 23: [^;]*$"):
        bench.train()
    assert (factors[18], factors[23]) == (1.0, pytest.approx(0.1))
    assert rate_factor(read_decisions(bench.store), 4) == pytest.approx(1 / 30)


def test_a_warm_up_counts_as_a_rate_that_rose(make_bench: Callable[..., TrainerBench]) -> None:
    bench = make_bench("roll_back")
    training = bench.config.training
    schedule = training.schedule.model_copy(update={"warmup_steps": 49})
    bench.config = bench.config.model_copy(update={"training": training.model_copy(update={"schedule": schedule})})
    with pytest.raises(RolledBack, match=r"to version 15, learning rate × 0.333: .* had risen from 6e-05 to 0.0001"):
        collapsing(bench).train()


def test_a_collapse_that_began_under_one_trainer_is_noticed_by_the_next(
    make_bench: Callable[..., TrainerBench],
) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 21)
    steps(bench, 21, 23, BAD)
    assert bench.train() == 23
    steps(bench, 23, 40, BAD)
    with pytest.raises(RolledBack, match=r"rolled back to version 20, .* version 25"):
        bench.train()


def test_a_run_that_went_on_collapsed_goes_back_once_it_may(make_bench: Callable[..., TrainerBench]) -> None:
    bench = collapsing(make_bench("go_on"))
    assert bench.train() == 40
    training = bench.config.training.model_copy(update={"on_collapse": "roll_back"})
    bench.config = bench.config.model_copy(update={"training": training})
    steps(bench, 40, 41, BAD)
    with pytest.raises(RolledBack, match=r"rolled back to version 20, .* version 41"):
        bench.train()


def test_checkpoints_of_earlier_versions_hold_no_memory_and_the_trainer_starts_without(
    make_bench: Callable[..., TrainerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("go_on")
    steps(bench, 0, 21)
    settle = TrainLoop._settle
    with monkeypatch.context() as earlier:
        earlier.setattr(
            TrainLoop, "_settle", lambda self: {key: one for key, one in settle(self).items() if key != "collapse"}
        )
        assert bench.train() == 21
    steps(bench, 21, 40, BAD)
    assert bench.train() == 40
    assert collapses(bench) == []


def test_rewards_of_other_groups_are_not_compared_with_those_before(make_bench: Callable[..., TrainerBench]) -> None:
    bench = make_bench("go_on")
    steps(bench, 0, 21)
    assert bench.train() == 21
    training = bench.config.training
    selection = training.selection.model_copy(update={"drop_zero_advantage": True})
    bench.config = bench.config.model_copy(update={"training": training.model_copy(update={"selection": selection})})
    steps(bench, 21, 40, [0.0, 0.2])
    assert bench.train() == 40
    assert collapses(bench) == []


def test_a_step_without_finite_values_goes_back_too(
    make_bench: Callable[..., TrainerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 20)
    step = Trainer.step

    def diverging(self: Trainer, samples: object, factor: float = 1.0) -> object:
        if self.policy_version == 17:
            raise TrainingDiverged("the gradient of aipo on the way to version 18 is not finite")
        return step(self, samples, factor)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", diverging)
    with pytest.raises(RolledBack, match=r"rolled back to version 15, learning rate × 0.333: the gradient of aipo"):
        bench.train()


def test_a_first_step_of_a_trainer_without_finite_values_goes_back_too(
    make_bench: Callable[..., TrainerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("roll_back")
    steps(bench, 0, 17)
    assert bench.train() == 17
    with_rate(bench, 20)

    def diverging(self: Trainer, samples: object, factor: float = 1.0) -> object:
        raise TrainingDiverged("the gradient of aipo on the way to version 18 is not finite")

    monkeypatch.setattr(Trainer, "step", diverging)
    steps(bench, 17, 18)
    with pytest.raises(RolledBack, match=r"to version 15, learning rate × 0.05: .* had risen from 0.0002 to 0.004"):
        bench.train()
