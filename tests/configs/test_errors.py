"""A user's mistake, as fields and as one line."""

import pickle

import pytest

from configs.errors import ConfigError, UserError
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
