"""Reads the stored answers of an evaluation."""

from functools import lru_cache

import pyarrow as pa

from millrace.evaluation.answers import read_answers
from millrace.evaluation.results import read_result
from storage.stores.factory import open_store


@lru_cache(maxsize=4)
def stored_answers(url: str, policy_version: int, t: float) -> pa.Table | None:
    """The answers of the version evaluated at `t` (unix seconds), in the run at `url`; columns `schema.ANSWERS`.

    None if they were not stored. Raises StorageError, StreamCorrupt for a damaged file, and OSError.
    """
    store = open_store(url)
    result = read_result(store, policy_version)
    return None if result is None else read_answers(store, result)
