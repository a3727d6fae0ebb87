"""Local copies of models and data sets that a config names on a Hugging Face hub, or as a stored run.

model.path: ORG/NAME ──────────┐   HF_ENDPOINT, HF_HOME,
prompts.source: ORG/NAME ──────┼─► HF_TOKEN: huggingface_hub ─► …/models--ORG--NAME/snapshots/REVISION ─┐
prompts.source: hf://datasets/ ┘                                                                        ├─► the config
model.path: a stored run ────────► its promoted checkpoint ─► HF_HOME/millrace/RUN/VERSION-CHECKSUM ────┘   of the run

Paths of teachers are treated as `model.path`. A resumed run keeps the copy that it started with. Without a network,
copies in the cache are used.
"""

import hashlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.errors import InputError
from millrace.evaluation.promotion import fetch_promoted
from millrace.prompts.files import SUFFIXES
from millrace.prompts.stored import is_stored_run
from millrace.runs.record import latest_attempt
from millrace.runtime.arguments import attempt_config
from storage import layout
from storage.checkpoints import read_latest
from storage.stores.base import Store
from storage.stores.factory import open_store

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILE_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_OTHER_FILES = ["*/*", "consolidated*"]
"""Folders, and the weights in Mistral's notation, which repeat those of the model."""
_ANSWER_SECONDS = 10.0
_MAX_NAMED_FILES = 4
_MAX_REASON = 160


class _Reference(NamedTuple):
    """A repository on a hub, or a file of one, that a setting names."""

    key: str
    value: str
    kind: Literal["model", "dataset"]
    repository: str
    file: str | None = None
    """The file of a data set; None: the only one of its split."""
    revision: str | None = None

    @property
    def split(self) -> str:
        return "train" if self.key.endswith("prompts.source") else "test"

    def error(self, reason: str, expected: str | None = None) -> InputError:
        kind = "" if self.kind == "model" else " --repo-type dataset"
        folder = f"a folder that `hf download {self.repository}{kind} --local-dir FOLDER` made"
        return InputError(
            key=self.key, read=f'"{self.value}", but {reason}', expected=expected or f"a path, such as {folder}"
        )


def with_local_copies(config: RunConfig, store: Store, log: Callable[[str], object]) -> RunConfig:
    """Copies each model and data set that `config` names by a hub ID or as a run; returns the config with their paths.

    If `store` holds the run already, its copies are kept. `log` gets a line for each copy. Raises InputError if a copy
    can't be had.
    """
    values = config.model_dump(mode="json")
    models = ["model.path", *(f"teachers.{name}.path" for name in config.teachers)]
    keys = [*models, *_keys(config)]
    for name in config.sources:
        # Those that it inherits are not among the values.
        keys += [f"sources.{name}.{key}" for key in _keys(config.by_source()[name])]
    named = {key: value for key in keys if (value := _value(values, key)) is not None}
    references = [reference for key, value in named.items() if (reference := _parse(key, value)) is not None]
    runs = {key: named[key] for key in models if key in named and is_stored_run(named[key])}
    if not references and not runs:
        return config
    stored = attempt_config(latest_attempt(store)).model_dump(mode="json") if store.exists(layout.RUN) else {}
    copies = {reference.key: _copy(reference, str(_value(stored, reference.key))) for reference in references}
    copies |= {key: _copy_promoted(key, url, str(_value(stored, key))) for key, url in runs.items()}
    for key, copy in copies.items():
        log(f'{key} "{named[key]}" is {copy}')
        put_key(values, key, copy)
    return RunConfig.model_validate(values)


def _copy_promoted(key: str, url: str, stored: str) -> str:
    """The path of a copy of a run's promoted checkpoint: `stored` if that is one that is still there, else the latest.

    Raises InputError if nothing is promoted, and StreamCorrupt.
    """
    from huggingface_hub import constants

    store = open_store(url)
    copies = Path(constants.HF_HOME) / "millrace" / PurePosixPath(store.url).name
    if Path(stored).parent == copies and Path(stored).exists():
        return stored
    record = read_latest(store, layout.PROMOTED)
    if record is None:
        raise InputError(f'"{url}", where no checkpoint is promoted', key=key, expected="a run with a promoted one")
    checksums = " ".join(record.files[name].checksum for name in sorted(record.files))
    folder = copies / f"v{record.step}-{hashlib.sha256(checksums.encode()).hexdigest()[:12]}"
    if not folder.exists():
        fetch_promoted(store, folder)
    return str(folder)


def _keys(config: RunConfig) -> list[str]:
    """The keys of a run or a source that may name something on a hub."""
    keys = ["prompts.source", "prompts.eval_source"]
    keys += ["scoring.model"] if config.loads_scoring_model else []
    return keys + [f"evaluation.sets.{name}.source" for name in config.evaluation.sets]


def _value(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None without one."""
    section, _, name = key.rpartition(".")
    return ((_value(values, section) if section else values) or {}).get(name)


def _parse(key: str, value: str | None) -> _Reference | None:
    """Parses a setting; None for a path, another URL, or built-in prompts."""
    names_model = key.endswith(("model.path", "scoring.model")) or key.startswith("teachers.")
    if value is None:
        return None
    if not names_model and (url := _FILE_URL.fullmatch(value)):
        return _Reference(key, value, "dataset", url[1], url[3], url[2])
    # A folder of that name here makes it a path, perhaps a misspelt one.
    if not _ID.fullmatch(value) or Path(value).parent.exists() or PurePosixPath(value).suffix in SUFFIXES:
        return None
    return _Reference(key, value, "model" if names_model else "dataset", value)


def _copy(reference: _Reference, stored: str) -> str:
    """The path of a local copy: `stored` if that is one, a new download of its revision if it is gone."""
    _, snapshot, rest = stored.partition(f"/{reference.kind}s--{reference.repository.replace('/', '--')}/snapshots/")
    revision, _, file = rest.partition("/")
    if not snapshot or (reference.file or file) != file:
        return _download(reference)
    return stored if Path(stored).exists() else _download(reference._replace(revision=revision, file=file or None))


def _download(reference: _Reference) -> str:
    """Downloads the files that the cache does not hold, and returns their path."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    hub, kind, file = constants.ENDPOINT, reference.kind, reference.file
    where: Any = {"repo_id": reference.repository, "revision": reference.revision}
    try:
        if kind == "model":
            return str(snapshot_download(**where, allow_patterns=_MODEL_FILES, ignore_patterns=_OTHER_FILES))
        if file is None:
            siblings = HfApi().dataset_info(**where, timeout=_ANSWER_SECONDS).siblings or ()
            file = _only_file(reference, [sibling.rfilename for sibling in siblings])
        return str(hf_hub_download(**where, repo_type=kind, filename=file))
    except InputError:
        raise
    # Without a network, behind a proxy, or with a server that is down, each library raises other errors.
    except Exception as error:
        reason = textwrap.shorten(str(error), _MAX_REASON, placeholder=" …") or type(error).__name__
        raise reference.error(f"no folder or cached copy is here, and {hub} did not give it ({reason})") from error


def _only_file(reference: _Reference, names: Sequence[str]) -> str:
    """The file of prompts of the split among the files `names` of a data set. Raises InputError unless there is one."""
    data = [name for name in names if PurePosixPath(name).suffix in SUFFIXES and "dataset_info" not in name]
    # Not "latest" for "test".
    split = re.compile(f"(?<![a-z]){reference.split}(?![a-z])")
    files = [name for name in data if split.search(name)] or data
    if len(files) != 1:
        urls = [f"hf://datasets/{reference.repository}/{name}" for name in files[:_MAX_NAMED_FILES]]
        expected = f"one, named such as {', '.join(urls)}" if urls else f"one of {', '.join(SUFFIXES)}"
        raise reference.error(f"the data set has {len(files)} files of {reference.split} prompts", expected)
    return files[0]
