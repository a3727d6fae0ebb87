"""The promote stage: promotes the latest checkpoint if it is better than the promoted one, exactly once.

    already decided? ──yes──────────────────────────────────────────────────────────────────────┐
          │ no                                                                                  ▼
    fence weights/promoted ─► decide ──promoted──► Hugging Face folder ─► files ─► record ─► decision ─► event
                                 └─────held back────────────────────────────────────────────────▲

After a kill, the restarted stage finds the decision, its own record, or neither. Files without a record belong to no
promotion. The event is sent at least once.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path

from millrace.errors import InputError
from millrace.evaluation.promotion import (
    Promotion,
    PromotionDecision,
    decide,
    promotion_of,
    read_decision,
    read_scored_result,
    write_decision,
)
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from storage import layout
from storage.checkpoints import Checkpoint, CheckpointWriter, read_latest
from storage.failpoints import failpoint


def main(stage: Stage) -> None:
    """Promotes the latest checkpoint or holds it back, and reports which and why."""
    stage.mark_ready("deciding on the latest checkpoint")
    decision = read_decision(stage.store, stage.arguments.attempt)
    if decision is None:
        decision = _pass_gate(stage)
        write_decision(stage.store, stage.arguments.attempt, decision)
        failpoint("promote.decided")
    stage.emit_event(
        "checkpoint.promoted" if decision.promoted else "checkpoint.held-back",
        policy_version=decision.policy_version,
        accuracy=decision.accuracy,
        sentence=decision.sentence,
    )
    stage.log(decision.sentence)


def _pass_gate(stage: Stage) -> PromotionDecision:
    attempt = stage.arguments.attempt
    checkpoint = read_latest(stage.store)
    if checkpoint is None:
        raise InputError("no checkpoint to promote yet", file=stage.store.url)
    writer = CheckpointWriter(stage.store, layout.PROMOTED, writer="promote")
    # Read after the writer's fence: no other process can promote from here on.
    last = None if writer.latest is None else promotion_of(writer.latest)
    if last is not None and last.attempt == attempt:
        return last.decision
    candidate = read_scored_result(stage.store, checkpoint.step)
    decision = decide(
        checkpoint.step,
        candidate,
        promoted=None if last is None else last.evaluation,
        start=read_scored_result(stage.store, 0),
        margin=stage.config.promotion.margin,
    )
    if decision.promoted:
        assert candidate is not None
        failpoint("promote.before_files")
        with stage.busy("promote"):
            files = _model_files(stage, checkpoint)
            promotion = Promotion(
                decision=decision, evaluation=candidate, incarnation=checkpoint.incarnation, attempt=attempt
            )
            writer.commit(checkpoint.step, files, asdict(promotion))
        failpoint("promote.after_record")
    return decision


def _model_files(stage: Stage, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The policy of `checkpoint` as a Hugging Face folder: its files by name. Raises StreamCorrupt."""
    # Imported late, because a checkpoint that is held back needs no model.
    from millrace.maintenance.export import write_model_folder
    from millrace.models.start_folder import start_folder

    model = stage.config.model
    start = start_folder(stage.store, model.path, stage.arguments.handover)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model_folder(stage.store, checkpoint, start, model, folder)
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


if __name__ == "__main__":
    run_stage("promote", main)
