"""What fsck asks of `run.json` and of the files in `attempts/`, which have no checksum."""

from millrace.runs.record import check_run_id, parse_attempt, parse_end
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store


def check_record(store: Store, path: str) -> int:
    """The size of one of these files, bytes. Raises StreamCorrupt unless it holds what it should."""
    try:
        data = bytes(store.get(path))
        values = parse_json(data)
    except NotInStore as error:
        raise StreamCorrupt(path, "not a file") from error
    except ValueError as error:
        raise StreamCorrupt(path, f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise StreamCorrupt(path, "not a JSON object")
    if path == layout.RUN:
        check_run_id(values)
    if path.endswith(".json"):
        parse_attempt(values, path)
    elif path.endswith(".ended"):
        parse_end(data, path)
    return len(data)
