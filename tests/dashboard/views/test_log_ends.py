"""The ends of the logs of a run, bounded and with their control characters escaped."""

from pathlib import Path

from dashboard.views.record import LINES, log_ends

EVIL = "<script>alert(1)</script>\u202e"


def write(root: Path, name: str, data: bytes) -> None:
    (root / "logs").mkdir(exist_ok=True)
    (root / "logs" / f"{name}.log").write_bytes(data)


def test_the_last_lines_of_a_log_are_shown_without_colours_and_with_control_characters_escaped(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(10_000)] + [f"\x1b[31m{EVIL}\x1b[0m\x1b[2J"]
    write(tmp_path, "train-0", "\n".join(lines).encode())
    shown = log_ends(str(tmp_path), ["train-0"])["train-0"].splitlines()
    assert shown[0] == f"line {10_000 - LINES + 1}"
    assert shown[-1] == "<script>alert(1)</script>\\u202e␛[2J"


def test_a_huge_line_is_cut_and_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, "train-0", b"x" * 10_000_000 + b"\xff")
    write(tmp_path, "score-0", b"\xff\xfe\x00")
    shown = log_ends(str(tmp_path), [])
    assert set(shown["train-0"]) == {"x"} and len(shown["train-0"]) < 1000
    assert shown["score-0"] == "��␀"


def test_a_log_that_is_missing_or_empty_has_no_lines_and_a_store_that_cant_be_read_says_so(tmp_path: Path) -> None:
    write(tmp_path, "score-0", b"")
    assert log_ends(str(tmp_path), ["train-0"]) == {"score-0": "", "train-0": ""}
    assert log_ends(str(tmp_path / "gone"), ["train-0"]) == {"train-0": ""}
    assert "can't be listed" in log_ends("gopher://nowhere", [])["all"]
