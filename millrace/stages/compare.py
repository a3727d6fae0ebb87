"""The compare stage: several losses on the batches of a stored run; the result goes into the replay's own run.

stored run ─► `millrace.replay.compare`, step by step ─┬─► replay/comparison.parquet   a row per step and loss
                                                       └─► replay/comparison.json      means, a row per loss
"""

from millrace.replay.compare import compare
from millrace.replay.results import Row, read_spec, summarize_comparison, write_result
from millrace.replay.source_run import SourceRun
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from storage.stores.factory import open_store


def main(stage: Stage) -> None:
    """Compares up to the last selected step."""
    spec = read_spec(stage.store)
    assert spec is not None
    run = SourceRun(open_store(spec.sources[0]))
    stage.mark_ready(f"comparing {', '.join(spec.losses)} on the batches of {run.url}")

    def each(rows: list[Row]) -> None:
        step = rows[0]["step"]
        stage.update_status(policy_version=step)
        norms = {f"{row['loss']}/grad_norm": row["grad_norm"] for row in rows}
        stage.metrics.log(incarnation=0, policy_version=step, **norms)

    with stage.busy("compare"):
        table = compare(run, spec.losses, selection=spec, each=each, on_progress=stage.advance)
    summary = summarize_comparison(table)
    write_result(stage.store, "comparison", summary, table=("comparison", table))
    losses = summary["losses"]
    stage.log(f"compared {', '.join(losses)} on {table.num_rows // len(losses)} batches")


if __name__ == "__main__":
    run_stage("compare", main)
