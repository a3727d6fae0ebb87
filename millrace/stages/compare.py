"""The compare stage: the same stored batches through several losses; what each makes of them goes into its own run.

    stored run ─► step by step, as `millrace.replay.compare` does ─┬─► replay/comparison.parquet   a row a step and loss
                                                                   └─► replay/comparison.json      means, a row a loss

Consumes: one stored run, reading only. Produces: the comparison, and a measurement a step and loss.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.replay.compare import compare
from millrace.replay.comparison import Row
from millrace.replay.spec import read_spec
from millrace.replay.stored import StoredRun
from millrace.stages.process import Stage, run_stage
from storage import layout
from storage.factory import open_store


def main(stage: Stage) -> None:
    """Compares until the last step that is selected."""
    spec = read_spec(stage.store)
    assert spec is not None
    run = StoredRun(open_store(spec.sources[0].url))
    stage.ready(f"taking the batches of {run.url} through {', '.join(spec.losses)}")

    def each(rows: list[Row]) -> None:
        step = rows[0]["step"]
        stage.progress(policy_version=step)
        norms = {f"{row['loss']}/grad_norm": row["grad_norm"] for row in rows}
        stage.metrics.log(incarnation=0, policy_version=step, **norms)

    with stage.busy("compare"):
        found = compare(run, spec.losses, selection=spec.selection, own_copies=spec.own_copies, each=each)
    sink = pa.BufferOutputStream()
    pq.write_table(found.table, sink)
    stage.store.put(f"{layout.REPLAY_RESULTS}/comparison.parquet", memoryview(sink.getvalue()))
    means = {"losses": list(found.losses), "means": found.means(), "logprob_error": found.logprob_error}
    stage.store.put(f"{layout.REPLAY_RESULTS}/comparison.json", json.dumps(means, indent=1).encode())
    stage.milestone(f"compared {', '.join(found.losses)} on {found.table.num_rows // len(found.losses)} batches")


if __name__ == "__main__":
    run_stage("compare", main)
