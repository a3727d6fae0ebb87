"""A user's mistake, as fields and as one line."""

import pickle
from pathlib import Path

import pytest

from configs.errors import ConfigError, UserError, near_names
from millrace.errors import InputError, MissingExtra


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (UserError("nothing to do"), "nothing to do"),
        (UserError(file="a.yaml", read="no such file"), "a.yaml: no such file"),
        (UserError(key="seed", read=-1, expected="at least 0"), "seed is -1; expected at least 0"),
        (UserError(file="a.yaml", key="seed", read="missing"), "a.yaml: seed is missing"),
        (UserError(file="a\nb", read="no\r\nfile"), "a b: no file"),
        (UserError(read="\x1b[31m, é\x07\x00"), r"\x1b[31m, é\x07\x00"),
    ],
)
def test_a_mistake_is_printed_in_one_line(mistake: UserError, line: str) -> None:
    assert str(mistake) == line


@pytest.mark.parametrize(
    "error",
    [
        InputError(key="seed", read=-1, expected="at least 0"),
        MissingExtra("--wandb", "wandb", "wandb"),
        ConfigError([UserError(key="a", read=1), UserError(key="b", read=2)]),
    ],
)
def test_a_mistake_reaches_another_process_whole(error: UserError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.fields()) == (str(error), error.fields())
    assert UserError(**error.fields()).fields() == error.fields()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data/trian.jsonl", "train.jsonl in {folder}/data"),
        ("dta/train.jsonl", "{folder}/dta to be there"),
        ("data/unlike", ""),
        ("data/train.jsonl", ""),
        ("s3://bucket/x", ""),
    ],
)
def test_a_missing_file_may_be_one_of_a_near_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, found: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert near_names(path if "://" in path else tmp_path / path) == found.format(folder=tmp_path)
