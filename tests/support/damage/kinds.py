"""What a person or a disk does to a file of a run, and where each kind of file is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def deleted(path: Path) -> None:
    if path.is_dir():
        # Out of reach first: a running process may add files to it.
        path = path.rename(path.with_name(f"deleted-{os.getpid()}"))
        shutil.rmtree(path)
    else:
        path.unlink()


def truncated(path: Path) -> None:
    """The second half is gone. Not in place: a process may have mapped the file, as it may map what it wrote."""
    _replace(path, path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    _replace(path, bytes(range(256)) * 4)


def other_json(path: Path) -> None:
    _replace(path, b'{"kind": 7, "seconds": [], "t": "noon", "pid": {}, "policy_version": "new", "config": 1}')


def directory(path: Path) -> None:
    deleted(path)
    path.mkdir()


def link_out(path: Path) -> None:
    """A link to a file outside of the run that holds something else."""
    outside = _run_of(path).parent / f"outside-{os.getpid()}"
    outside.write_bytes(b"not of this run")
    deleted(path)
    path.symlink_to(outside)


def of_another_run(path: Path) -> None:
    """The file of the run `other`, which is beside this one, at the same place or in the same folder."""
    run = _run_of(path)
    same = run.parent / "other" / path.relative_to(run)
    found = same if same.is_file() else next(file for file in sorted(same.parents[1].rglob("*")) if file.is_file())
    _replace(path, found.read_bytes())


def _run_of(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "run.json").exists())


def overwritten(path: Path) -> None:
    """The first page, in place: the processes that have mapped the file see it."""
    with path.open("r+b") as file:
        file.write(b"\xa5" * 4096)


def flipped(path: Path) -> None:
    """A bit of what the file holds, in place, in each of its pages that hold something."""
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096 + 2048)
            found = file.read(1)
            if found and found[0]:
                file.seek(page * 4096 + 2048)
                file.write(bytes([found[0] ^ 4]))


def forbidden(path: Path) -> None:
    path.chmod(0)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"damage-{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def record(stream: str, *, back: int) -> Callable[[Path], Path]:
    """The record of a log so many before its newest."""
    return lambda run: sorted((run / stream / "log").glob("*.json"))[-1 - back]


def next_record(stream: str) -> Callable[[Path], Path]:
    """Where the next record of a log will be; it is not there yet."""

    def find(run: Path) -> Path:
        newest = record(stream, back=0)(run)
        return newest.with_name(f"{int(newest.stem) + 1:0{len(newest.stem)}d}.json")

    return find


def newest(pattern: str) -> Callable[[Path], Path]:
    """The file that was written last among those that match."""
    return lambda run: max(filter(Path.is_file, run.glob(pattern)), key=lambda path: path.stat().st_mtime)


def at(path: str) -> Callable[[Path], Path]:
    return lambda run: run / path
