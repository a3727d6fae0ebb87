"""The command as a person starts it: refusals before anything is served, and a server that ends quietly."""

import argparse
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from support.campaigns.campaigns import Millrace
from support.pages.sites import TOKEN, store_run

from dashboard.server import cli
from dashboard.server.serve import serve
from millrace.errors import InputError


def command(*arguments: str) -> int:
    """The command in this process; its exit code."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return cli.run(parser.parse_args(["dashboard", *arguments]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store_run(tmp_path / "runs", "one", 1)
    return tmp_path / "runs"


@pytest.fixture
def millrace(tmp_path: Path) -> Iterator[Millrace]:
    command = Millrace(tmp_path / "runs", dict(os.environ))
    yield command
    command.close()


def test_a_port_that_is_taken_is_refused(root: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError):
            serve(str(root), host="127.0.0.1", port=port, token=None)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_machine_is_refused(root: Path, host: str) -> None:
    with pytest.raises(InputError):
        serve(str(root), host=host, port=0, token=TOKEN)


@pytest.mark.parametrize("count", [0, 9])
def test_a_folder_of_no_run_or_too_many_is_not_exported(tmp_path: Path, count: int) -> None:
    for number in range(count):
        (tmp_path / "runs" / f"run-{number}").mkdir(parents=True)
    with pytest.raises(InputError):
        command(str(tmp_path / "runs"), "--export", str(tmp_path / "file.html"))
    assert not (tmp_path / "file.html").exists()


def test_a_run_is_exported_to_the_file_named(root: Path, tmp_path: Path) -> None:
    assert command(str(root), "--export", str(tmp_path / "file.html")) == 0
    assert "Staleness over time" in (tmp_path / "file.html").read_text()


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command("--port", port)
    assert ended.value.code == 2


def test_a_mistake_ends_the_command_with_2_and_one_sentence(root: Path, millrace: Millrace) -> None:
    process = millrace.start("dashboard", str(root), "--host", "0.0.0.0", "--port", "0")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.count("\n")) == (2, 1)


@pytest.mark.slow
def test_it_says_where_it_is_answers_there_and_ends_quietly_with_ctrl_c(root: Path, millrace: Millrace) -> None:
    process = millrace.start("dashboard", str(root), "--port", "0", "--token", TOKEN)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert TOKEN not in line
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
    assert httpx.get(address).status_code == 401
    assert httpx.get(address, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    port = int(address.rpartition(":")[2].rstrip("/"))
    with ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.get(address).status_code == 401, "it answers while other connections are silent"
    huge = httpx.post(f"{address}_dash-update-component", content=b"x" * 200_000)
    assert huge.status_code == 413
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
