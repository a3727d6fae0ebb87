"""Writes the stored streams of today's schema version, once: `schema-<n>/` and `schema-<n>.json` beside this file."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[3]))

from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.schema import METRIC, SCHEMA_VERSION, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter, stream_head

GROUP_SIZE = 4
VOCAB_SIZE = 50

Rows = list[dict[str, Any]]


def trajectories(first: int) -> Rows:
    return [trajectory(row_id) for row_id in range(first, first + GROUP_SIZE)]


def trajectory(row_id: int) -> dict[str, Any]:
    num_tokens = 1 + row_id % 5
    return {
        "row_id": row_id,
        "group_id": 100 + row_id // GROUP_SIZE,
        "prompt_id": f"prompt-{row_id // GROUP_SIZE}",
        "sample_index": row_id % GROUP_SIZE,
        "prompt_tokens": [1, 2, row_id],
        "response_tokens": [(7 * row_id + place) % VOCAB_SIZE for place in range(num_tokens)],
        "rollout_logprobs": [-(place + 1) / 8 for place in range(num_tokens)],
        "span_versions": [row_id, row_id + 1],
        "span_starts": [0, 1],
        "min_policy_version": row_id,
        "max_policy_version": row_id + 1,
        "incarnation": row_id // 8,
        "loss_mask": [place % 2 for place in range(num_tokens)],
        "finish_reason": "stop" if row_id % 2 else "length",
        "temperature": 0.75,
        "top_p": 0.5,
        "max_new_tokens": 8,
        "generator": 0,
        "epoch": row_id // 8,
        "seed": 2**62 + row_id,
        "t_admitted": row_id + 0.25,
        "t_started": row_id + 0.5,
        "t_finished": row_id + 0.75,
        "meta": json.dumps({"answer": f"½·{row_id}"}),
        "message_roles": ["user", "assistant"] if row_id % 2 else [],
        "message_starts": [0, 2] if row_id % 2 else [],
        "kept_tokens": [(7 * row_id + place) % VOCAB_SIZE for place in range(num_tokens)],
        "kept_counts": [1] * num_tokens,
        "routed_experts": list(range(2 * (2 + num_tokens))) if row_id % 2 else [],
    }


def scores(first: int) -> Rows:
    return [
        {
            "row_id": row_id,
            "reward": None if row_id % 3 == 2 else row_id / 8,
            "components": '{"exact_match": 1.0}',
            "status": "timeout" if row_id % 3 == 2 else "ok",
            "error": "took longer than 1 s" if row_id % 3 == 2 else None,
            "verifier_version": "exact_match-1",
            "seconds": 0.125,
        }
        for row_id in range(first, first + GROUP_SIZE)
    ]


def write_trajectories(store: Store) -> Rows:
    """Three parts of one group each: two of one writer, which ends, and one of the next."""
    rows: Rows = []
    for num_parts in (2, 1):
        writer = StreamWriter(
            store, layout.trajectories(0), TRAJECTORY, "generate-0", vocab_size=VOCAB_SIZE, group_size=GROUP_SIZE
        )
        for _ in range(num_parts):
            part = trajectories(writer.rows)
            writer.write(
                pa.Table.from_pylist(part, schema=TRAJECTORY),
                tokens=sum(len(row["response_tokens"]) for row in part),
                min_policy_version=part[0]["min_policy_version"],
                max_policy_version=part[-1]["max_policy_version"],
                incarnation=part[0]["incarnation"],
                group_ids=[part[-1]["group_id"]],
                last_group_id=part[-1]["group_id"],
                missing_groups=[part[-1]["group_id"] - 1],
            )
            rows += part
        if num_parts == 2:
            writer.end()
    return rows


def write_scores(store: Store) -> Rows:
    writer = StreamWriter(store, layout.scores("exact_match", 0, 0, 1), SCORE, "score-0")
    for _ in range(2):
        writer.write(pa.Table.from_pylist(scores(writer.rows), schema=SCORE), tokens=9)
    writer.end()
    return scores(0) + scores(4)


def write_metrics(store: Store) -> Rows:
    row = {"t": 1.5, "incarnation": 0, "policy_version": 3, "name": "loss", "value": 0.25}
    StreamWriter(store, layout.metrics("train", 0), METRIC, "train-0").write(
        pa.Table.from_pylist([row], schema=METRIC), tokens=0
    )
    return [row]


def write_checkpoint(store: Store) -> dict[str, Any]:
    cursor = stream_head(store, layout.trajectories(0)).to_json()
    checkpoint = {"step": 7, "files": {"model": "weights", "rng/0": ""}, "state": {"cursors": [cursor], "rate": 1e-05}}
    files = {name: text.encode() for name, text in checkpoint["files"].items()}
    CheckpointWriter(store).commit(checkpoint["step"], files, checkpoint["state"])
    return checkpoint


def main() -> None:
    folder = Path(__file__).parent / f"schema-{SCHEMA_VERSION}"
    if folder.exists():
        sys.exit(f"{folder} is there already, and is never written again")
    store = LocalStore(folder)
    rows = {
        layout.trajectories(0): write_trajectories(store),
        layout.scores("exact_match", 0, 0, 1): write_scores(store),
        layout.metrics("train", 0): write_metrics(store),
    }
    streams = {path: {"head": stream_head(store, path).to_json(), "rows": found} for path, found in rows.items()}
    holds = {"streams": streams, "checkpoint": write_checkpoint(store)}
    folder.with_suffix(".json").write_text(json.dumps(holds, indent=1) + "\n")


if __name__ == "__main__":
    main()
