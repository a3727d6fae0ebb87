"""Reads the stored answers of an evaluation."""

import pyarrow as pa

from millrace.evaluation.answers import read_answers
from millrace.evaluation.results import read_result
from storage.stores.factory import open_store


def stored_answers(url: str, policy_version: int) -> pa.Table | None:
    """The answers of an evaluated version of the run at `url`, columns `schema.ANSWERS`; None if they were not stored.

    Raises StorageError, StreamCorrupt for a damaged file, and OSError.
    """
    store = open_store(url)
    result = read_result(store, policy_version)
    return None if result is None else read_answers(store, result)
