"""Every storage error also is the standard library's error that it refines, and survives a trip between processes."""

import copy

from storage import errors

REFINES = {
    errors.BadName: ValueError,
    errors.StoreRefused: ValueError,
    errors.NotInStore: FileNotFoundError,
    errors.StoreDenied: PermissionError,
    errors.StoreFull: OSError,
    errors.StoreUnreachable: ConnectionError,
    errors.StreamCorrupt: ValueError,
    errors.PartCorrupt: errors.StreamCorrupt,
    errors.PartRemoved: FileNotFoundError,
    errors.SchemaUnknown: ValueError,
    errors.Fenced: RuntimeError,
}


def test_each_error_is_a_storage_error_and_a_standard_one() -> None:
    defined = {error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)}
    assert defined == {errors.StorageError, *REFINES}
    for error, refined in REFINES.items():
        assert issubclass(error, errors.StorageError)
        assert issubclass(error, refined)


def test_a_corrupt_stream_names_file_record_and_reason() -> None:
    error = errors.StreamCorrupt("seg/x", "too short", 7)
    assert (error.file, error.reason, error.record) == ("seg/x", "too short", 7)
    assert str(error) == "seg/x (named by record 7): too short"
    for copied in (copy.copy(error), copy.copy(errors.PartCorrupt("seg/x", "too short", 7))):
        assert str(copied) == str(error)
    assert str(errors.StreamCorrupt("log/x", "not JSON")) == "log/x: not JSON"
