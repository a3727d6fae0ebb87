"""Real processes, really killed: nothing committed is lost, and nothing is there twice."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader

WRITER = Path(__file__).with_name("parts_until_killed.py")
KILLS = 10


@pytest.mark.slow
def test_a_writer_killed_at_random_moments_and_restarted_leaves_every_row_once_in_order(tmp_path: Path) -> None:
    chooser = random.Random(0)
    reader = StreamReader(LocalStore(tmp_path), "s", METRIC)
    rows: list[int] = []
    acknowledged = 0
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, WRITER, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(chooser.randint(1, 20)):
                acknowledged = max(acknowledged, int(writer.stdout.readline()))
            time.sleep(chooser.uniform(0, 0.01))
            writer.kill()
        while part := reader.next():
            rows += part.table.column("policy_version").to_pylist()
        assert len(rows) >= acknowledged
    assert acknowledged > KILLS
    assert rows == list(range(len(rows)))
    assert reader.cursor.epoch >= KILLS // 2
    afresh = StreamReader(LocalStore(tmp_path), "s", METRIC)
    assert [row for part in iter(afresh.next, None) for row in part.table.column("policy_version").to_pylist()] == rows
