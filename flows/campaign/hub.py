"""Local copies of models and data sets that a config names by their ID on a hub of Hugging Face.

model.path: ORG/NAME ──────────────┐   HF_ENDPOINT, HF_HOME,        the path of the copy, which holds its revision:
prompts.source: ORG/NAME ──────────┼─► HF_TOKEN: huggingface_hub ─► …/models--ORG--NAME/snapshots/REVISION
prompts.source: hf://datasets/… ───┘                                  │
                                                                      └─► the config that the run stores

A resumed run keeps the copy that it started with.
"""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from configs.schema import RunConfig
from configs.stored import put_key
from millrace.errors import InputError
from millrace.prompts.files import SUFFIXES
from millrace.runs.record import latest_attempt
from millrace.runtime.arguments import attempt_config
from storage import layout
from storage.stores.base import Store

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILE_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_OTHER_FILES = ["*/*", "consolidated*"]
"""Folders, and weights in the notation of Mistral, which repeat those of the model."""
_SECONDS = 10.0
_MOST_NAMED = 4
_LONGEST_REASON = 160


class _Reference(NamedTuple):
    """A repository on a hub, or a file of one, that a setting names."""

    setting: str
    """The key and its value, for people."""
    kind: Literal["model", "dataset"]
    repository: str
    file: str | None = None
    """Of a data set; None: the only one of its split."""
    revision: str | None = None
    split: str = "train"


def with_local_copies(config: RunConfig, store: Store, log: Callable[[str], object]) -> RunConfig:
    """Downloads each model and data set that `config` names by a hub ID, and returns the config with their paths.

    If `store` holds the run already, its copies are kept. `log` gets a line for each copy. Raises InputError with one
    sentence if a copy can't be had.
    """
    values, stored = config.model_dump(mode="json"), None
    for key in _keys(config):
        value = _value(values, key)
        if value is None or (reference := _reference_in(key, value)) is None:
            continue
        if stored is None:
            resumed = store.exists(layout.RUN)
            stored = attempt_config(latest_attempt(store)).model_dump(mode="json") if resumed else {}
        copy = _copy(reference, _value(stored, key))
        log(f"{reference.setting} is {copy}")
        put_key(values, key, copy)
    return config if stored is None else RunConfig.model_validate(values)


def _keys(config: RunConfig) -> Sequence[str]:
    scoring = config.scoring
    judges = ["scoring.model"] if "reward_model" in (scoring.reward, *scoring.weights) else []
    sets = [f"evaluation.sets.{name}.source" for name in config.evaluation.sets]
    return ["model.path", *judges, "prompts.source", "prompts.eval_source", *sets]


def _value(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None without one."""
    section, _, name = key.rpartition(".")
    return ((_value(values, section) if section else values) or {}).get(name)


def _reference_in(key: str, value: str) -> _Reference | None:
    """Parses a setting; None for a path, another URL, or built-in prompts."""
    setting, split = f'{key} "{value}"', "train" if key == "prompts.source" else "test"
    of_model = key in ("model.path", "scoring.model")
    if not of_model and (url := _FILE_URL.fullmatch(value)):
        return _Reference(setting, "dataset", url[1], url[3], url[2])
    # A folder of that name here makes it a path, perhaps a misspelt one.
    if not _ID.fullmatch(value) or Path(value).parent.exists() or PurePosixPath(value).suffix in SUFFIXES:
        return None
    return _Reference(setting, "model" if of_model else "dataset", value, split=split)


def _copy(reference: _Reference, stored: object) -> str:
    """The path of a local copy; the `stored` path if that is one."""
    _, here, rest = str(stored).partition(f"/{reference.kind}s--{reference.repository.replace('/', '--')}/snapshots/")
    revision, _, file = rest.partition("/")
    if not here or (reference.file or file) != file:
        return _download(reference)
    if Path(str(stored)).exists():
        return str(stored)
    return _download(reference._replace(revision=revision, file=file or None))


def _download(reference: _Reference) -> str:
    """Downloads the files that the cache does not hold, and returns the path. Without a network, the cache serves."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    kind, hub = reference.kind, constants.ENDPOINT
    where: Any = {"repo_id": reference.repository, "revision": reference.revision}
    info = HfApi().model_info if kind == "model" else HfApi().dataset_info
    failure: Exception | None = None
    names: list[str] = []
    try:
        names = [file.rfilename for file in info(**where, timeout=_SECONDS).siblings or ()]
    except GatedRepoError:
        raise _refused(reference, f"{hub} gives it only to those who accept its terms and `hf auth login`") from None
    except RepositoryNotFoundError:
        raise _refused(reference, f"{hub} has no such {kind}, or a private one") from None
    # No network, a proxy, a server that is down: each raises other errors.
    except Exception as error:  # noqa: BLE001
        failure = error
    try:
        if kind == "model":
            where |= {"allow_patterns": _MODEL_FILES, "ignore_patterns": _OTHER_FILES}
            return str(snapshot_download(**where, local_files_only=failure is not None))
        if failure is not None and reference.file is None:
            raise failure
        file = reference.file or _only_file(reference, names)
        return str(hf_hub_download(**where, repo_type=kind, filename=file, local_files_only=failure is not None))
    except InputError:
        raise
    except Exception as error:
        reason = (
            textwrap.shorten(str(failure or error), _LONGEST_REASON, placeholder=" …")
            or type(failure or error).__name__
        )
        raise _refused(reference, f"no copy of it in the cache, and {hub} did not give it ({reason})") from error


def _only_file(reference: _Reference, names: Sequence[str]) -> str:
    """The one file of prompts of the split among the files `names` of a data set."""
    data = [name for name in names if PurePosixPath(name).suffix in SUFFIXES and "dataset_info" not in name]
    # Not "latest" for "test".
    split = re.compile(f"(?<![a-z]){reference.split}(?![a-z])")
    files = [name for name in data if split.search(name)] or data
    if len(files) != 1:
        urls = [f"hf://datasets/{reference.repository}/{name}" for name in files[:_MOST_NAMED]]
        raise InputError(
            f"{reference.setting}: the data set has {len(files)} files of {reference.split} prompts; expected one"
            + (f", named such as {', '.join(urls)}" if urls else f" of {', '.join(SUFFIXES)}")
        )
    return files[0]


def _refused(reference: _Reference, reason: str) -> InputError:
    kind = "" if reference.kind == "model" else " --repo-type dataset"
    return InputError(
        f"{reference.setting}: no such folder here; {reason}; expected a path, such as a folder that "
        f"`hf download {reference.repository}{kind} --local-dir FOLDER` made"
    )
