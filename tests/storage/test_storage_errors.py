"""Storage errors are printed in one form, and survive a trip between processes."""

import copy
import pickle

import pytest

from storage import errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (errors.StoreFull("no room left"), "no room left"),
        (errors.NotInStore("not in s3://b", file="run.json"), "run.json: not in s3://b"),
        (errors.BadName("not allowed", file="run id 'é'", expected="A-Z"), "run id 'é': not allowed; expected A-Z"),
        (errors.StreamCorrupt("log/x", "not JSON"), "log/x: not JSON"),
        (errors.PartCorrupt("seg/x", "too short", 7), "seg/x (named by record 7): too short"),
    ],
)
def test_an_error_is_one_line_of_its_fields_in_every_process(error: errors.StorageError, line: str) -> None:
    for copied in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(copied) == line
        assert (copied.file, copied.read, copied.expected) == (error.file, error.read, error.expected)
