"""The cause of a stage process's death for people."""

from pathlib import Path

import pytest

from tasks.exit_causes import OomKills, cause, oom_counters, with_last_lines


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
    first, second, *lines = with_last_lines("train-0 exited with code 1", log).splitlines()
    assert first == "train-0 exited with code 1"
    assert str(log) in second
    assert lines == [f"line {i}" for i in range(85, 100)]


def counter(folder: Path, kills: int) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "memory.events"
    file.write_text(f"low 0\nhigh 12\noom 3\noom_kill {kills}\noom_group_kill 0\n")
    return file


def test_a_kill_is_seen_for_half_a_minute(tmp_path: Path) -> None:
    kills = OomKills([counter(tmp_path, 0)], now=0.0)
    for now in range(100):
        kills.look(now)
    counter(tmp_path, 1)
    seen = []
    for now in range(100, 200):
        kills.look(now)
        seen.append(kills.happened())
    assert all(seen[:30])
    assert not any(seen[36:])


def test_the_first_existing_counter_is_read(tmp_path: Path) -> None:
    group, machine, missing = tmp_path / "group", tmp_path / "machine", tmp_path / "missing"
    assert oom_counters()[-1] == Path("/proc/vmstat")
    assert not OomKills([missing], now=0.0).happened()
    kills = OomKills([missing, counter(group, 0), counter(machine, 0)], now=0.0)
    counter(machine, 1)
    assert not kills.happened()
    counter(group, 1)
    assert kills.happened()
