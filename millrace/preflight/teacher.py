"""Checks teachers: the folder is a model's, and its tokenizer is the policy's.

    path   a model folder ───────────────────────────────┐
           a stored run: a copy of its promoted checkpoint ┼─► config.json, weights ─► tokenizer = the policy's?
           start: the policy before its first update ─────┘

The tokenizers are compared in a child process, `python -m millrace.preflight.teacher`, and again by the stage `teach`,
because a start model that the run makes itself is not there before.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from configs.training import TeacherConfig
from millrace.errors import InputError
from millrace.evaluation.promotion import fetch_promoted
from millrace.models.supported import check_trainable
from millrace.preflight.child import serve
from millrace.preflight.model import read_folder
from millrace.preflight.model_folder import check_folder_files, check_weight_files
from millrace.runs.provenance import content_hash
from storage import layout
from storage.checkpoints import read_latest
from storage.stores.factory import open_store

MODULE = "millrace.preflight.teacher"
START = "start"


@contextmanager
def teacher_folder(path: str, start: Path | None) -> Iterator[Path]:
    """The model folder of the teacher `path`, where `start` is the start model's.

    That of a stored run is a copy that lasts as long as the block. Raises InputError if nothing is promoted there.
    """
    if path == START:
        assert start is not None, "a run that trains has a start model"
        yield start
    elif _is_run(path):
        with tempfile.TemporaryDirectory() as temporary:
            fetch_promoted(open_store(path), Path(temporary) / "model")
            yield Path(temporary) / "model"
    else:
        yield Path(path).expanduser()


def teacher_inputs(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """The content of each teacher but the start model, by key and value of the config.

    Raises InputError for one that can't be read.
    """
    return {
        input_key(name, teacher): _content(name, teacher.path)
        for name, teacher in teachers.items()
        if teacher.path != START
    }


def input_key(name: str, teacher: TeacherConfig) -> str:
    """The name of a teacher among the inputs of a run."""
    return f"teachers.{name}.path {teacher.path}"


def _content(name: str, path: str) -> str:
    if _is_run(path):
        record = read_latest(open_store(path), layout.PROMOTED)
        if record is None:
            raise InputError(f"{path}, where no checkpoint is promoted", key=f"teachers.{name}.path")
        files = json.dumps({file: asdict(ref) for file, ref in record.files.items()}, sort_keys=True)
        return f"promoted version {record.step} {hashlib.sha256(files.encode()).hexdigest()[:12]}"
    try:
        return content_hash(Path(path).expanduser())
    except OSError as error:
        read = f"{path}, which can't be read: {error.strerror}"
        raise InputError(read, key=f"teachers.{name}.path", expected="a model folder, or a stored run") from error


def _is_run(path: str) -> bool:
    return "://" in path or (Path(path).expanduser() / layout.RUN).is_file()


def check_teacher(name: str, path: str, policy: Path | None) -> None:
    """Checks the teacher of that name. Raises InputError about the first mistake. Imports transformers.

    `policy` is the folder of the start model; None: the run makes it later.
    """
    if path == START:
        return
    with teacher_folder(path, policy) as folder:
        model = read_folder(folder, f"teachers.{name}.path")
        check_folder_files(folder, model)
        check_weight_files(folder, model)
        check_trainable(model)
        if policy is not None:
            check_same_tokenizer(name, folder, policy)


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
