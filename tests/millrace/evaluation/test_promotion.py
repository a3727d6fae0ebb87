"""The promotion gate: its decisions, its record, and a promotion that is killed."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stages.failpoints import Failpoints
from support.stores.dict_store import DictStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.operation import PromotionConfig
from configs.schema import ModelConfig, RunConfig
from configs.stored import AnnotatorPools
from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.evaluation.promotion import (
    Promotion,
    PromotionDecision,
    decide,
    fetch_promoted,
    promotion_of,
    read_decision,
    write_decision,
)
from millrace.evaluation.results import HELD_OUT, Result, as_result
from millrace.maintenance.fsck import fsck
from millrace.maintenance.gc import Retention, carry_out, plan
from millrace.rollouts.ledger import Account
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.runs.record import create_run, resume_run
from millrace.runtime.arguments import StageArguments
from millrace.runtime.messages import Event, EventKind, Heartbeat, read_line
from millrace.runtime.stage import Stage
from millrace.stages import promote
from millrace.training.checkpoints.names import WEIGHTS_FILE
from millrace.training.checkpoints.policy_state import load_weights
from millrace.training.trainer import Trainer
from storage import layout
from storage.checkpoints import CheckpointWriter, checkpoints_backwards, read_latest
from storage.errors import BadName, StreamCorrupt
from storage.stores.base import Store
from storage.stores.local import LocalStore


def measured(version: int, accuracy: float, prompts: int = 100) -> Result:
    return {"policy_version": version, "accuracy": accuracy, "prompts": prompts}


START = measured(0, 0.25)


@pytest.mark.parametrize(
    ("candidate", "promoted", "margin", "passes"),
    [
        (measured(40, 0.26), None, 0.0, True),
        (measured(40, 0.25), None, 0.0, False),
        (measured(40, 0.375), None, 0.125, False),
        (measured(40, 0.376), None, 0.125, True),
        (measured(40, 0.5), measured(20, 0.5), 0.0, False),
        # Worse than the start model, but it is the promoted one that counts.
        (measured(40, 0.2), measured(20, 0.1), 0.0, True),
    ],
)
def test_a_checkpoint_must_exceed_the_bar_by_more_than_the_margin(
    candidate: Result, promoted: Result | None, margin: float, passes: bool
) -> None:
    decision = decide(40, candidate, promoted=promoted, start=START, margin=margin)
    assert (decision.promoted, decision.policy_version, decision.accuracy) == (passes, 40, candidate["accuracy"])
    assert decision.bar == (promoted or START)["accuracy"]


@pytest.mark.parametrize(
    ("version", "candidate", "promoted", "start", "margin"),
    [
        (40, measured(40, 1.0), None, START, None),
        (0, START, None, START, 0.0),
        (40, measured(40, 1.0), measured(40, 0.5), START, 0.0),
        (40, None, None, START, 0.0),
        (40, measured(40, 1.0), None, None, 0.0),
        (40, measured(40, 1.0, 50), None, START, 0.0),
        (40, measured(40, 1.0, 50), measured(20, 0.1), START, 0.0),
    ],
)
def test_a_checkpoint_that_cannot_be_compared_is_held_back(
    version: int,
    candidate: Result | None,
    promoted: Result | None,
    start: Result | None,
    margin: float | None,
) -> None:
    assert not decide(version, candidate, promoted=promoted, start=start, margin=margin).promoted


def mixed(version: int, weights: dict[str, float], **accuracies: float) -> Result:
    by_source = {
        source: {HELD_OUT: {"accuracy": accuracy, "accuracy_interval": [0.0, 1.0], "prompts": 64, "errors": 0}}
        for source, accuracy in accuracies.items()
    }
    return {"policy_version": version, **as_result(by_source, weights)}


def test_the_bar_of_several_sources_is_their_mean_under_the_weights_of_the_candidate() -> None:
    start = mixed(0, {"math": 3, "words": 1}, math=0.8, words=0.2)
    candidate = mixed(40, {"math": 1, "words": 1}, math=0.7, words=0.4)
    decision = decide(40, candidate, promoted=None, start=start, margin=0.0)
    assert (decision.promoted, decision.bar, decision.accuracy) == (True, 0.5, pytest.approx(0.55))
    assert not decide(40, candidate, promoted=None, start=start, margin=0.1).promoted


def test_a_checkpoint_with_another_source_than_the_bar_is_held_back() -> None:
    start = mixed(0, {"math": 1, "words": 1}, math=0.1, words=0.1)
    candidate = mixed(40, {"math": 1, "chess": 1}, math=0.9, words=0.9, chess=0.9)
    decision = decide(40, candidate, promoted=None, start=start, margin=0.0)
    assert not decision.promoted
    assert all(name in decision.sentence for name in ("math", "words", "chess"))


def test_a_decision_is_kept_as_it_was_first_made() -> None:
    store = DictStore()
    assert read_decision(store, 3) is None
    first = PromotionDecision(promoted=False, policy_version=7, accuracy=None, sentence="no", bar=None)
    write_decision(store, 3, first)
    write_decision(
        store, 3, PromotionDecision(promoted=True, policy_version=7, accuracy=0.5, sentence="another", bar=0.25)
    )
    assert read_decision(store, 3) == first


def promote_files(store: Store, version: int, files: dict[str, bytes], accuracy: float = 0.5) -> None:
    """Commits a promotion as the stage does."""
    decision = PromotionDecision(promoted=True, policy_version=version, accuracy=accuracy, sentence="yes", bar=None)
    promotion = Promotion(decision=decision, evaluation=measured(version, accuracy), incarnation=2, attempt=1)
    CheckpointWriter(store, layout.PROMOTED, writer="promote").commit(version, files, asdict(promotion))


def test_the_last_record_is_what_is_promoted(tmp_path: Path) -> None:
    store = DictStore()
    assert read_latest(store, layout.PROMOTED) is None
    with pytest.raises(InputError):
        fetch_promoted(store, tmp_path / "model")
    promote_files(store, 9, {"config.json": b"old"}, accuracy=0.9)
    promote_files(store, 4, {"config.json": b"new", "extra/template.jinja": b""}, accuracy=0.95)
    promotion = fetch_promoted(store, tmp_path / "made" / "model")
    assert (promotion.evaluation, promotion.incarnation, promotion.attempt) == (measured(4, 0.95), 2, 1)
    assert promotion.decision == PromotionDecision(
        promoted=True, policy_version=4, accuracy=0.95, sentence="yes", bar=None
    )
    assert (tmp_path / "made" / "model" / "config.json").read_bytes() == b"new"
    assert (tmp_path / "made" / "model" / "extra" / "template.jinja").read_bytes() == b""
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"], "nothing else is left there"
    with pytest.raises(InputError):
        fetch_promoted(store, tmp_path / "made" / "model")


def test_a_damaged_promoted_file_is_named_and_no_folder_appears(tmp_path: Path) -> None:
    store = DictStore()
    promote_files(store, 4, {"config.json": b"{}", "model.safetensors": b"weights"})
    (path,) = (path for path in store.objects if path.endswith("model.safetensors"))
    store.objects[path] = b"weighty"
    with pytest.raises(StreamCorrupt):
        fetch_promoted(store, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_a_run_from_elsewhere_can_not_write_outside_the_folder(name: str, tmp_path: Path) -> None:
    store = DictStore()
    promote_files(store, 4, {"inside": b"harmless"})
    record = read_latest(store, layout.PROMOTED)
    assert record is not None
    CheckpointWriter(store, layout.PROMOTED, writer="w").commit_stored(4, {name: record.files["inside"]}, record.state)
    with pytest.raises(BadName):
        fetch_promoted(store, tmp_path / "deep" / "model")
    assert list((tmp_path / "deep").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


class Run:
    """A run in a folder, with a start model, checkpoints and evaluations, and its promote stage as a process."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any) -> None:
        self.folder = folder
        model.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        self.store = LocalStore(folder / "run")
        config = RunConfig(
            training=TrainingConfig(max_steps=9),
            model=ModelConfig(path=str(folder / "base")),
            promotion=PromotionConfig(margin=0.0),
        ).model_dump(mode="json")
        self.config = config
        self.attempt = create_run(self.store, "run", config).number
        self.trainer = Trainer(model, TrainingConfig(max_steps=9, learning_rate=0.1))
        self.evaluate(0, 0.25)

    def checkpoint(self, version: int) -> None:
        """Other weights, committed as a trainer does."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.add_(0.01 * version)
        self.trainer.policy_version = version
        intake = RolloutLoader(
            self.store,
            pools=AnnotatorPools({"scores/exact_match": 1}),
            num_generators=1,
            vocab_size=self.trainer.vocab_size,
            lineage=Lineage.after(None, 0),
            state=None,
        )
        state = {"account": Account().to_json(), "intake": intake.state()}
        CheckpointWriter(self.store).commit(version, self.trainer.state(), state)

    def evaluate(self, version: int, accuracy: float) -> None:
        result = {"policy_version": version, "accuracy": accuracy, "prompts": 100, "t": 50.0}
        self.store.put_if_absent(layout.evaluation(version), json.dumps(result).encode())

    def arguments(self) -> StageArguments:
        return StageArguments(
            run_url=self.store.url, attempt=self.attempt, replica=0, handover=self.folder / "handover"
        )

    def promote(self) -> PromotionDecision:
        """Runs the promote stage in this process; returns its decision."""
        config = RunConfig.model_validate(self.config)
        promote.main(Stage(name="promote", arguments=self.arguments(), config=config, store=self.store))
        decision = read_decision(self.store, self.attempt)
        assert decision is not None
        return decision

    def promote_in_a_process(self, failpoint: str) -> tuple[int, list[str]]:
        """Runs one promote stage. Returns its exit code, and the failpoint if it did not fire."""
        armed = Failpoints(self.folder / "fired", failpoint)
        with (
            (self.folder / "log").open("w+") as log,
            subprocess.Popen(
                [sys.executable, "-m", "millrace.stages.promote", *self.arguments().as_argv()],
                env={**armed.environment(), "OMP_NUM_THREADS": "1"},
                # Held open while it runs: its lifeline.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            process.stdout.read()
            code = process.wait()
            log.seek(0)
            assert code in (0, -signal.SIGKILL), log.read()
        return code, armed.missed()

    def whole(self) -> list[int]:
        """Versions promoted, in order; each of them is there, whole."""
        report = fsck(self.store)
        assert report.damaged == 0, report.findings
        records = checkpoints_backwards(self.store, layout.PROMOTED)
        return [promotion_of(record).evaluation["policy_version"] for record in records][::-1]


def messages(capsys: pytest.CaptureFixture[str]) -> list[Event | str]:
    """Events and milestones since the last call."""
    lines = [read_line(line) for line in capsys.readouterr().out.split("\n") if line]
    return [line for line in lines if not isinstance(line, Heartbeat)]


@pytest.fixture
def run(tmp_path: Path, make_model: Any, tokenizer: Any) -> Run:
    return Run(tmp_path, make_model(), tokenizer)


def test_the_promoted_folder_is_the_checkpoint_for_transformers(run: Run, tmp_path: Path) -> None:
    run.checkpoint(5)
    run.evaluate(5, 0.5)
    assert run.promote().promoted
    promotion = fetch_promoted(run.store, tmp_path / "model")
    assert promotion.evaluation.items() >= measured(5, 0.5).items()
    assert (promotion.attempt, promotion.incarnation) == (0, 0)
    assert {"config.json", "tokenizer.json", WEIGHTS_FILE} <= {file.name for file in (tmp_path / "model").iterdir()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    checkpoint = read_latest(run.store)
    assert checkpoint is not None
    for name, tensor in load_weights(run.store, checkpoint, {}).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tokens = torch.tensor([tokenizer("1+2=")["input_ids"]])
    trained = run.trainer.model.eval()
    # The trainer's own attention is for packed microbatches.
    trained.set_attn_implementation(model.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)


def test_the_bar_is_the_promoted_version_and_each_attempt_decides_once(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint(5)
    run.evaluate(5, 0.5)
    first = run.promote()
    assert first.promoted
    capsys.readouterr()
    assert run.promote() == first
    payload = {"policy_version": 5, "accuracy": 0.5, "sentence": first.sentence}
    event = Event(kind="checkpoint.promoted", payload=payload)
    assert messages(capsys) == [BEGUN, event, first.sentence], "asked again, the same"
    for attempt, version, accuracy, passes in [(1, 6, 0.45, False), (2, 7, 0.6, True), (3, 7, 0.6, False)]:
        run.attempt = resume_run(run.store, run.config).number
        assert run.attempt == attempt
        run.checkpoint(version)
        run.evaluate(version, accuracy)
        decision = run.promote()
        assert decision.promoted == passes, decision.sentence
        kind: EventKind = "checkpoint.promoted" if passes else "checkpoint.held-back"
        payload = {"policy_version": version, "accuracy": accuracy, "sentence": decision.sentence}
        assert messages(capsys) == [BEGUN, Event(kind=kind, payload=payload), decision.sentence]
    assert run.whole() == [5, 7]


RECORD = "weights/promoted/log/000000000001.json"
BEGUN = "deciding on the latest checkpoint"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("place", "visible"),
    [
        pytest.param("promote.before_files", False, marks=pytest.mark.faults),
        pytest.param(f"put.mid:weights/promoted/data/*/{WEIGHTS_FILE}", False, marks=pytest.mark.faults),
        (f"put.before:{RECORD}", False),
        pytest.param(f"put.after:{RECORD}", True, marks=pytest.mark.faults),
        ("promote.after_record", True),
        pytest.param(f"put.before:{layout.promotion(0)}", True, marks=pytest.mark.faults),
        pytest.param("promote.decided", True, marks=pytest.mark.faults),
    ],
)
def test_a_stage_killed_anywhere_promotes_once_when_it_runs_again(
    run: Run, place: str, visible: bool, tmp_path: Path
) -> None:
    run.checkpoint(5)
    run.evaluate(5, 0.5)
    failpoint = f"promote-0 {place} 1 kill"
    assert run.promote_in_a_process(failpoint) == (-signal.SIGKILL, []), place
    assert run.whole() == ([5] if visible else []), place
    assert run.promote_in_a_process(failpoint)[0] == 0
    assert run.whole() == [5], place
    decision = read_decision(run.store, 0)
    assert decision is not None
    assert decision.promoted
    # Leftovers of the killed stage are deleted, and the promoted model stays.
    made = plan(run.store, Retention(keep_checkpoints=1), now=2**40)
    carry_out(run.store, made)
    assert run.whole() == [5], place
    assert fsck(run.store).findings == [], place
    assert fetch_promoted(run.store, tmp_path / "model").evaluation["policy_version"] == 5
