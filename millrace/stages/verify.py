"""The verify stage: trains a stored run's batches again; the verdict goes into the replay's own run.

stored run ─► start model or checkpoint ─► `millrace.replay.verify`, step by step ─► replay/verdict.json
"""

from millrace.replay.results import StepVerdict, read_spec, write_result
from millrace.replay.verify import verify
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from storage.stores.factory import open_store


def main(stage: Stage) -> None:
    """Verifies up to the last step, or to the first that differs."""
    spec = read_spec(stage.store)
    assert spec is not None
    stage.mark_ready(f"training the batches of {spec.sources[0]} again")

    def each(step: StepVerdict) -> None:
        stage.update_status(policy_version=step.step, rollouts=step.rollouts, tokens=step.tokens)
        stage.metrics.log(incarnation=0, policy_version=step.step, logprobs_difference=step.logprobs_difference or 0.0)
        if step.checkpoint is not None:
            same = "the same" if step.checkpoint.identical else "within the tolerance"
            stage.log(f"version {step.step}: weights {step.checkpoint.hash}, {same} as stored")

    with stage.busy("verify"):
        verdict = verify(
            open_store(spec.sources[0]),
            from_step=spec.from_step,
            to_step=spec.to_step,
            tolerance=spec.tolerance,
            each=each,
            on_progress=stage.advance,
        )
    write_result(stage.store, "verdict", verdict.to_json())
    stage.log(verdict.sentence)


if __name__ == "__main__":
    run_stage("verify", main)
