"""Every storage error also is the standard library's error that it refines, and survives a trip between processes."""

import copy

import pytest

from storage import errors

REFINES = {
    errors.BadName: ValueError,
    errors.StoreRefused: ValueError,
    errors.NotInStore: FileNotFoundError,
    errors.StreamCorrupt: ValueError,
    errors.SchemaUnknown: ValueError,
    errors.Fenced: RuntimeError,
}


@pytest.mark.parametrize("error", REFINES)
def test_each_error_is_a_storage_error_and_the_stdlib_error_it_refines(error: type[Exception]) -> None:
    assert issubclass(error, errors.StorageError)
    assert issubclass(error, REFINES[error])


def test_a_corrupt_stream_names_file_record_and_reason() -> None:
    error = errors.StreamCorrupt("seg/x", "too short", 7)
    assert (error.file, error.reason, error.record) == ("seg/x", "too short", 7)
    assert str(error) == "seg/x (named by record 7): too short"
    assert str(copy.copy(error)) == str(error)
    assert str(errors.StreamCorrupt("log/x", "not JSON")) == "log/x: not JSON"
