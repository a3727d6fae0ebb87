"""What a disk, a crash or a person does to a stored run."""

from pathlib import Path

from storage.stores.local import LocalStore


def flip_a_bit(store: LocalStore, stream: str, *, part: int = -1) -> None:
    """In the middle of a part of a stream."""
    path = sorted(_folder(store, stream, "seg").iterdir())[part]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def tear_the_last_record(store: LocalStore, stream: str) -> None:
    """Half of it was written when the machine went down."""
    path = max(_folder(store, stream, "log").glob("[0-9]*.json"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put_a_folder(store: LocalStore, file: str) -> None:
    """In place of a file."""
    path = _folder(store, file)
    path.unlink()
    path.mkdir()


def _folder(store: LocalStore, *parts: str) -> Path:
    found = store.local_path("/".join(parts))
    assert found is not None
    return found
