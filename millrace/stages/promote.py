"""The promote stage: is the latest checkpoint better than what is promoted? Then it is promoted, once, whole.

    decided already? ──yes──────────────────────────────────────────────────────────────────────┐
          │ no                                                                                  ▼
    fence weights/promoted ─► decide ──promoted──► Hugging Face folder ─► files ─► record ─► decision ─► told
                                 └─────held back────────────────────────────────────────────────▲

Killed anywhere and started again, it finds the decision, or its own record, or neither; then what it had written is
part of nothing. It tells its decision at least once.
"""

import tempfile
from pathlib import Path

from millrace.errors import InputError
from millrace.promotion import (
    Decision,
    decide,
    promoted_of,
    read_decision,
    read_evaluation,
    state_of,
    write_decision,
)
from millrace.stages.process import Stage, run_stage
from storage import layout
from storage.checkpoints import Checkpoint, CheckpointWriter, read_latest
from storage.failpoints import failpoint


def main(stage: Stage) -> None:
    """Decides about the latest checkpoint, promotes it or holds it back, and says which and why."""
    stage.ready("judging the latest checkpoint")
    decision = read_decision(stage.store, stage.arguments.attempt)
    if decision is None:
        decision = _pass_gate(stage)
        write_decision(stage.store, stage.arguments.attempt, decision)
        failpoint("promote.decided")
    stage.tell(
        "checkpoint.promoted" if decision.promoted else "checkpoint.held-back",
        policy_version=decision.policy_version,
        accuracy=decision.accuracy,
        sentence=decision.sentence,
    )
    stage.milestone(decision.sentence)


def _pass_gate(stage: Stage) -> Decision:
    attempt = stage.arguments.attempt
    checkpoint = read_latest(stage.store)
    if checkpoint is None:
        raise InputError(f"{stage.store.url}: no checkpoint to promote yet")
    writer = CheckpointWriter(stage.store, layout.PROMOTED, writer="promote")
    # Read behind the writer's fence: from here on nobody else can promote.
    last = None if writer.latest is None else promoted_of(writer.latest)
    if last is not None and last.attempt == attempt:
        return last.decision
    candidate = read_evaluation(stage.store, checkpoint.step)
    decision = decide(
        checkpoint.step,
        candidate,
        promoted=None if last is None else last.evaluation,
        start=read_evaluation(stage.store, 0),
        margin=stage.config.promotion.margin,
    )
    if decision.promoted:
        assert candidate is not None
        failpoint("promote.before_files")
        with stage.busy("promote"):
            files = _model_files(stage, checkpoint)
            state = state_of(decision, candidate, incarnation=checkpoint.incarnation, attempt=attempt)
            writer.commit(checkpoint.step, files, state)
        failpoint("promote.after_record")
    return decision


def _model_files(stage: Stage, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The policy of `checkpoint` as a Hugging Face folder: its files by name. Raises StreamCorrupt."""
    # Late: a checkpoint that is held back needs no model.
    from millrace.checkpointing.hugging_face import write_model_folder
    from millrace.model import start_folder

    model = stage.config.model
    start = start_folder(stage.store, model.path, stage.arguments.handover)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model_folder(stage.store, checkpoint, start, model.dtype, folder)
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


if __name__ == "__main__":
    run_stage("promote", main)
