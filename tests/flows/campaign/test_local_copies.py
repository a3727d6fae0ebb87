"""Models and data sets on a hub, and models of stored runs: a run starts with a local copy and keeps it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.campaigns.campaigns import PRESET, REPOSITORY
from support.stores.dict_store import DictStore

from configs.load import load_config
from configs.schema import RunConfig
from flows.campaign.local_copies import with_local_copies
from millrace.evaluation.promotion import Promotion, PromotionDecision
from millrace.runs.record import create_run
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.stores.local import LocalStore

Repositories = dict[str, Mapping[str, bytes]]
"""Files by name of each repository: `ORG/NAME`, of data sets `datasets/ORG/NAME`."""


class Hub:
    """The content of the hub, and the files that it served."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: Repositories = {}
        self.gated: set[str] = set()
        self.given: list[str] = []

    def revision(self, name: str) -> str:
        """The commit of a repository: another one when a file changes."""
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub without repositories, at `hub.url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/")
            if path.startswith("api/"):
                kind, organisation, name, *rest = [*path.removeprefix("api/").split("/"), "", ""]
                repository = ("" if kind == "models" else f"{kind}/") + f"{organisation}/{name}"
                self._tell(repository, listing=rest[:1] == ["tree"])
            else:
                repository, _, rest = path.partition("/resolve/")
                self._give(repository, rest.partition("/")[2])

        do_HEAD = do_GET

        def _tell(self, repository: str, listing: bool) -> None:
            if repository not in hub.repositories:
                self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
                return
            if repository in hub.gated:
                self._answer(403, headers={"X-Error-Code": "GatedRepo"})
                return
            files = hub.repositories[repository]
            about: object = {
                "id": repository.removeprefix("datasets/"),
                "sha": hub.revision(repository),
                "siblings": [{"rfilename": name} for name in files],
            }
            if listing:
                about = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            self._answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

        def _give(self, repository: str, name: str) -> None:
            data = hub.repositories[repository][name]
            if self.command == "GET":
                hub.given.append(name)
            tag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": hub.revision(repository)})

        def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Keeps the tests' output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CHILD = """
import json, sys
from configs.load import load_config
from flows.campaign.local_copies import with_local_copies
from millrace.errors import InputError
from storage.stores.factory import open_store

lines = []
try:
    config = with_local_copies(load_config(sys.argv[1], sys.argv[3:]), open_store(sys.argv[2]), lines.append)
    answer = {"model": config.model.path, "source": config.prompts.source, "eval": config.prompts.eval_source}
    answer |= {name: source.prompts.source for name, source in config.sources.items()}
    answer |= {name: teacher.path for name, teacher in config.teachers.items()}
except InputError as error:
    answer = error.fields()
print(json.dumps({**answer, "lines": lines}))
"""
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"tokens",
    "pytorch_model.bin": b"pickle",
    "onnx/model.json": b"{}",
    "consolidated.safetensors": b"again",
}
LINES = b'{"prompt": "1+1=", "answer": "2"}\n'
Ask = Callable[..., dict[str, str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        served.repositories = {"org/model": MODEL, "datasets/org/sums": {"README.md": b"", "data/train.jsonl": LINES}}
        yield served


@pytest.fixture
def ask(tmp_path: Path, hub: Hub) -> Ask:
    """`ask("model.path=org/model")`: the paths in the config that a run with these settings gets."""
    config = tmp_path / "config.yaml"
    config.write_text("training: {max_steps: 1}")

    def answer(*settings: str, endpoint: str = hub.url, store: Path = tmp_path / "run") -> dict[str, str]:
        # The library reads these variables when it is imported.
        variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        command: Sequence[str] = [sys.executable, "-c", CHILD, str(config), str(store), *settings]
        result = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        values: dict[str, str] = json.loads(result.stdout)
        return values

    return answer


def test_a_model_becomes_a_folder_with_the_needed_files(hub: Hub, ask: Ask) -> None:
    answer = ask("model.path=org/model")
    folder = Path(answer["model"])
    assert folder.name == hub.revision("org/model")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert answer["lines"] == [f'model.path "org/model" is {folder}']


def test_a_data_set_becomes_the_file_of_its_split(hub: Hub, ask: Ask) -> None:
    hub.repositories["datasets/org/sums"] = {"dataset_infos.json": b"{}", "train.jsonl": LINES, "test.jsonl": b"{}"}
    answer = ask("prompts.source=org/sums", "prompts.eval_source=hf://datasets/org/sums/test.jsonl")
    assert [Path(answer[name]).name for name in ("source", "eval")] == ["train.jsonl", "test.jsonl"]
    assert Path(answer["source"]).read_bytes() == LINES
    assert hub.given == ["train.jsonl", "test.jsonl"]


def test_a_data_set_of_a_source_is_copied_and_inherited_ones_are_copied_once(hub: Hub, ask: Ask) -> None:
    hub.repositories["datasets/org/words"] = {"test.jsonl": b"{}", "train.jsonl": LINES}
    answer = ask("prompts.source=org/sums", "sources.words.prompts.source=org/words", "sources.sums.weight=2")
    assert [Path(answer[name]).name for name in ("source", "words")] == ["train.jsonl", "train.jsonl"]
    assert answer["sums"] == "arithmetic", "not set"
    assert hub.given == ["data/train.jsonl", "train.jsonl"]
    assert ask("sources.words.prompts.source=org/nothing")["key"] == "sources.words.prompts.source"


def test_several_files_of_a_split_are_listed_as_settings(hub: Hub, ask: Ask) -> None:
    hub.repositories["datasets/org/sums"] = {"a/train.jsonl": LINES, "b/train.jsonl": LINES, "b/test.jsonl": LINES}
    error = ask("prompts.source=org/sums")
    assert "2 files of train prompts" in error["read"]
    assert "hf://datasets/org/sums/a/train.jsonl, hf://datasets/org/sums/b/train.jsonl" in error["expected"]
    assert hub.given == []


def test_without_a_network_the_cached_copy_is_used(ask: Ask) -> None:
    settings = ("model.path=org/model", "prompts.source=hf://datasets/org/sums/data/train.jsonl")
    online = ask(*settings)
    offline = ask(*settings, endpoint="http://127.0.0.1:9")
    assert (offline["model"], offline["source"]) == (online["model"], online["source"])


def test_a_run_keeps_its_revision_when_the_hub_has_a_newer_one(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    settings = ("model.path=org/model", "prompts.source=org/sums")
    first = ask(*settings)
    paths = [f"model.path={first['model']}", f"prompts.source={first['source']}"]
    stored = load_config(tmp_path / "config.yaml", paths)
    create_run(LocalStore(tmp_path / "run"), "run", stored.model_dump(mode="json"))
    hub.repositories |= {"org/model": {**MODEL, "config.json": b"[]"}, "datasets/org/sums": {"train.jsonl": b""}}
    assert ask(*settings, endpoint="http://127.0.0.1:9") == first
    assert ask(*settings, store=tmp_path / "another")["model"] != first["model"]


@pytest.mark.parametrize(
    "setting",
    [
        "model.path=org/nothing",
        "prompts.source=org/nothing",
        "model.path=org/gated",
        "prompts.source=hf://datasets/org/sums/nothing.jsonl",
    ],
)
def test_a_missing_copy_is_a_user_error_with_a_way_out(hub: Hub, ask: Ask, setting: str) -> None:
    hub.repositories["org/gated"] = MODEL
    hub.gated.add("org/gated")
    error = ask(setting)
    assert error["key"] == setting.partition("=")[0]
    assert "did not give it" in error["read"]
    assert "`hf download org/" in error["expected"]


def test_the_command_checks_the_copy_before_a_run_exists(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli.main", "run", str(PRESET), "--root", str(tmp_path / "runs")]
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
    result = subprocess.run(
        [*command, "--set", "model.path=org/model"],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"millrace: {tmp_path}/cache/hub/models--org--model/")
    assert not (tmp_path / "runs").exists()


def test_paths_urls_and_built_in_prompts_are_not_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    paths = ["gpt2", "~/org/model", "./org/model", str(tmp_path / "org" / "model"), "models/misspelt"]
    sources = ["chains", "org/sums.jsonl", "memory://org/sums.csv", "reasoning_gym:chain_sum", "a/b/c"]
    for path, source in zip(paths, sources, strict=True):
        values = {"model": {"path": path}, "prompts": {"source": source}, "training": {"max_steps": 1}}
        config = RunConfig.model_validate(values)
        assert with_local_copies(config, DictStore(), pytest.fail) is config


def promote(run: Path, step: int) -> None:
    """Promotes a model of one file at this version of the run."""
    store = LocalStore(run)
    if not store.exists(layout.RUN):
        create_run(store, run.name, RunConfig.model_validate({"training": {"max_steps": 1}}).model_dump(mode="json"))
    decision = PromotionDecision(promoted=True, policy_version=step, accuracy=None, sentence="better", bar=None)
    promotion = Promotion(decision=decision, evaluation={}, incarnation=0, attempt=0)
    CheckpointWriter(store, layout.PROMOTED).commit(step, {"config.json": f"[{step}]".encode()}, asdict(promotion))


def test_a_stored_run_gives_a_copy_of_its_promoted_checkpoint_which_a_resumed_run_keeps(
    hub: Hub, ask: Ask, tmp_path: Path
) -> None:
    promote(tmp_path / "before", 20)
    setting = f"model.path={tmp_path / 'before'}"
    first = ask(setting)
    assert (Path(first["model"]) / "config.json").read_text() == "[20]"
    stored = load_config(tmp_path / "config.yaml", [f"model.path={first['model']}"])
    create_run(LocalStore(tmp_path / "run"), "run", stored.model_dump(mode="json"))
    promote(tmp_path / "before", 40)
    assert ask(setting)["model"] == first["model"]
    newer = ask(setting, store=tmp_path / "another")
    assert (Path(newer["model"]) / "config.json").read_text() == "[40]"


def test_a_teacher_may_be_a_stored_run_or_of_a_hub(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    promote(tmp_path / "before", 20)
    hub.repositories["org/expert"] = MODEL
    settings = [f"teachers.old.path={tmp_path / 'before'}", "training.distillation.teacher=old"]
    settings += ["teachers.expert.path=org/expert", "sources.sums.training.distillation.teacher=expert"]
    settings += [
        "teachers.first.path=start",
        "sources.words.training.distillation.teacher=first",
        "sources.all.weight=1",
    ]
    teachers = ask(*settings)
    assert (Path(teachers["old"]) / "config.json").read_text() == "[20]"
    assert (Path(teachers["expert"]) / "tokenizer.json").read_bytes() == b"tokens"
    assert teachers["first"] == "start"


def test_a_stored_run_that_promoted_nothing_is_a_user_error(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"training": {"max_steps": 1}}).model_dump(mode="json")
    create_run(LocalStore(tmp_path / "before"), "before", config)
    assert ask(f"model.path={tmp_path / 'before'}")["key"] == "model.path"
