"""The verify stage: a stored run's batches trained again; the verdict goes into the replay's own run.

    stored run ─► start model or checkpoint ─► step by step, as `millrace.replay.verify` does ─► replay/verdict.json

Consumes: one stored run, reading only. Produces: the verdict, and a measurement a step.
"""

import json

from millrace.replay.spec import read_spec
from millrace.replay.verdict import StepVerdict
from millrace.replay.verify import verify
from millrace.stages.process import Stage, run_stage
from storage import layout
from storage.factory import open_store


def main(stage: Stage) -> None:
    """Verifies until the last step, or the first that differs."""
    spec = read_spec(stage.store)
    assert spec is not None
    stage.ready(f"training the batches of {spec.sources[0].url} again")

    def each(step: StepVerdict) -> None:
        stage.progress(policy_version=step.step, rollouts=step.rollouts, tokens=step.tokens)
        stage.metrics.log(incarnation=0, policy_version=step.step, logprobs_difference=step.logprobs_difference or 0.0)
        if step.checkpoint is not None:
            same = "the same" if step.checkpoint.identical else "within the tolerance"
            stage.milestone(f"version {step.step}: weights {step.checkpoint.hash}, {same} as stored")

    with stage.busy("verify"):
        verdict = verify(
            open_store(spec.sources[0].url),
            from_step=spec.selection.from_step,
            to_step=spec.selection.to_step,
            tolerance=spec.tolerance,
            each=each,
        )
    stage.store.put(f"{layout.REPLAY_RESULTS}/verdict.json", json.dumps(verdict.to_json(), indent=1).encode())
    stage.milestone(verdict.sentence)


if __name__ == "__main__":
    run_stage("verify", main)
