"""Checks teachers: the folder is a model's, its tokenizer is the policy's, and its context holds the sequences.

path   a model folder ────────────────────────────┐
       start: the policy before its first update ─┴─► config.json, weights ─► tokenizer = the policy's?

The tokenizers are compared in a child process, `python -m millrace.preflight.teacher`, and again by the stage `teach`,
because a start model that the run makes itself is not there before.
"""

from collections.abc import Mapping
from pathlib import Path

from millrace.errors import InputError
from millrace.models.supported import check_trainable
from millrace.preflight.child import serve
from millrace.preflight.model import read_folder
from millrace.preflight.model_folder import check_folder_files, check_weight_files

MODULE = "millrace.preflight.teacher"
START = "start"
"""The path of a teacher that is the start model."""


def check_teacher(name: str, path: str, policy: Path | None) -> None:
    """Checks the teacher of that name. Raises InputError about the first mistake. Imports transformers.

    `policy` is the folder of the start model; None: the run makes it later.
    """
    if path == START:
        return
    folder = Path(path).expanduser()
    model = read_folder(folder, f"teachers.{name}.path")
    check_folder_files(folder, model)
    check_weight_files(folder, model)
    check_trainable(model)
    if policy is not None:
        check_same_tokenizer(name, folder, policy)


def check_context(name: str, path: str, num_tokens: int) -> None:
    """Raises InputError if the teacher of that name can't read a sequence of `num_tokens`."""
    key = f"teachers.{name}.path"
    context = None if path == START else read_folder(Path(path).expanduser(), key).get("max_position_embeddings")
    if context is not None and context < num_tokens:
        expected = f"at least {num_tokens}, the tokens of the longest prompt and of generation.max_new_tokens"
        raise InputError(f"a model with a context of {context} tokens", key=key, expected=expected)


def check_same_tokenizer(name: str, folder: Path, policy: Path) -> int:
    """Returns the number of token ids of the teacher's tokenizer, in `folder`.

    Raises InputError unless it has the policy's tokens; the models' vocabularies may be padded. Imports transformers.
    """
    from millrace.models.loading import load_tokenizer

    of_teacher, of_policy = ({i: t for t, i in load_tokenizer(path).get_vocab().items()} for path in (folder, policy))
    for token_id in sorted({*of_teacher, *of_policy}):
        taught, known = of_teacher.get(token_id), of_policy.get(token_id)
        if taught != known:
            raise InputError(
                f"a model with another tokenizer: its token {token_id} is {taught!r}, the policy's is {known!r}",
                key=f"teachers.{name}.path",
                expected="a model with the policy's tokenizer",
            )
    return max(of_teacher) + 1


def answer(question: Mapping[str, Mapping[str, str] | str | None]) -> None:
    """The child process. Raises the InputError of `check_teacher`."""
    teachers, policy = question["teachers"], question["policy"]
    assert isinstance(teachers, Mapping)
    for name, path in teachers.items():
        check_teacher(name, path, None if policy is None else Path(str(policy)))


if __name__ == "__main__":
    serve(answer)
