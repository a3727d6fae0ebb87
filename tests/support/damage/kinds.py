"""Damage that a person or a disk does to a file of a run, and where each kind of file is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

FindFile = Callable[[Path], Path]
"""The path of a file by the folder of its run."""


def delete(path: Path) -> None:
    if path.is_dir():
        # Out of reach first: a running process may add files to it.
        path = path.rename(path.with_name(f"deleted-{os.getpid()}"))
        shutil.rmtree(path)
    else:
        path.unlink()


def replace(path: Path, data: bytes) -> None:
    """Replaces the file, not in place: a process may have mapped it."""
    temporary = path.with_name(f"damage-{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def make_folder(path: Path) -> None:
    delete(path)
    path.mkdir()


def link_outside(path: Path) -> None:
    """Replaces the file with a link to a file outside of the run that holds something else."""
    outside = _run_of(path).parent / f"outside-{os.getpid()}"
    outside.write_bytes(b"not of this run")
    delete(path)
    path.symlink_to(outside)


def take_from_other_run(path: Path) -> None:
    """Replaces the file with one of the neighbouring run `other`: of the same place or the same folder."""
    run = _run_of(path)
    same = run.parent / "other" / path.relative_to(run)
    other = same if same.is_file() else next(file for file in sorted(same.parents[1].rglob("*")) if file.is_file())
    replace(path, other.read_bytes())


def _run_of(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "run.json").exists())


def overwrite_header(path: Path) -> None:
    """Overwrites the first page, in place: the processes that have mapped the file see it."""
    with path.open("r+b") as file:
        file.write(b"\xa5" * 4096)


def flip_in_each_page(path: Path) -> None:
    """Flips a bit, in place, in each page that holds something."""
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096 + 2048)
            byte = file.read(1)
            if byte and byte[0]:
                file.seek(page * 4096 + 2048)
                file.write(bytes([byte[0] ^ 4]))


BEFORE_RESUME: dict[str, Callable[[Path], object]] = {
    "deleted": delete,
    "truncated": lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: replace(path, bytes(range(256)) * 4),
    "a folder": make_folder,
    "a link out": link_outside,
    "of another run": take_from_other_run,
    "forbidden": lambda path: path.chmod(0),
}
_OTHER_JSON = b'{"kind": 7, "seconds": [], "t": "noon", "pid": {}, "policy_version": "new", "config": 1}'
WHILE_RUNNING: dict[str, Callable[[Path], object]] = {
    **BEFORE_RESUME,
    "put in its place": Path.mkdir,
    "JSON of another kind": lambda path: replace(path, _OTHER_JSON),
    "cut off": lambda path: os.truncate(path, 100),
    "its header overwritten": overwrite_header,
    "a bit flipped": flip_in_each_page,
    "moved away": lambda path: path.rename(path.with_name("moved")),
}


def record(stream: str, *, back: int) -> FindFile:
    """The record of a log, `back` records before its newest."""
    return lambda run: sorted((run / stream / "log").glob("*.json"))[-1 - back]


def next_record(stream: str) -> FindFile:
    """The next record of a log, which is not there yet."""

    def find(run: Path) -> Path:
        last = record(stream, back=0)(run)
        return last.with_name(f"{int(last.stem) + 1:0{len(last.stem)}d}.json")

    return find


def newest(pattern: str) -> FindFile:
    """The file that was written last among those that match."""
    return lambda run: max(filter(Path.is_file, run.glob(pattern)), key=lambda path: path.stat().st_mtime)


def at(path: str) -> FindFile:
    return lambda run: run / path
