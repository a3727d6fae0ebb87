"""The cause of a stage process's death for people."""

from pathlib import Path

import pytest

from millrace.forking.exit_causes import OomKills, cause, last_lines


@pytest.mark.parametrize(
    ("code", "out_of_memory", "sentence"),
    [
        (3, False, "exited with code 3"),
        (-15, False, "was killed by SIGTERM"),
        (-9, False, "was killed by SIGKILL"),
        (-9, True, "was killed by the kernel, out of memory"),
        (1, True, "exited with code 1, just after the kernel killed a process, out of memory"),
    ],
)
def test_an_exit_code_is_described(code: int, out_of_memory: bool, sentence: str) -> None:
    assert cause(code, out_of_memory=out_of_memory) == sentence


def test_the_last_lines_of_the_log_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "train-0.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    with log.open("rb") as file:
        assert last_lines(file).splitlines() == [f"line {i}" for i in range(85, 100)]


def test_a_kill_is_seen_for_half_a_minute() -> None:
    count = 7
    kills = OomKills(0.0, lambda: count)
    for now in range(100):
        kills.look(now)
    assert not kills.happened()
    count = 8
    seen = []
    for now in range(100, 200):
        kills.look(now)
        seen.append(kills.happened())
    assert all(seen[:30])
    assert not any(seen[36:])
