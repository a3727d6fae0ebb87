"""A real S3 server: Ceph's gateway, as packaged by Debian, unpacked but not installed, on loopback.

    apt-get --download-only ──► *.deb ──► dpkg -x ──► root/      once a machine, in ~/.cache/millrace-tests/ceph
    mon (1) ◄── osd.0 (objects in memory) ◄── radosgw (S3)       once a test session: about a second

The OSD adds itself to the map, and the monitor does not gather changes before it agrees on them with itself: these
two make a cluster start in a second or two, not in twenty. The monitor starts on a disk that is nearly full, too: by
default it ends when less than 5 % is free.
"""

import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.stores.s3_server import S3Server

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
KEY, SECRET = "test-key", "test-secret"

CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
paxos propose interval = 0.02
paxos min wait = 0.01
mon client hunt interval = 0.3
run dir = {run}
admin socket =
log file =
log to stderr = true
mon cluster log to file = false
mon data avail crit = 0
mon data avail warn = 0
plugin dir = {root}/usr/lib/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd class load list = *
osd class default list = *
[mon.a]
mon data = {run}/mon
mon addr = 127.0.0.1:{mon_port}
[osd.0]
osd data = {run}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
public addr = 127.0.0.1
cluster addr = 127.0.0.1
[client.rgw]
rgw data = {run}/rgw
rgw frontends = beast endpoint={host}:{s3_port} tcp_nodelay=1
rgw run sync thread = false
rgw enable gc threads = false
rgw enable lc threads = false
"""


class CephUnavailable(Exception):
    """This machine can't get Ceph's packages; the message says why."""


class CephServer(S3Server):
    """A Ceph gateway: unlike an imitation, it checks who asks."""


@dataclass(frozen=True)
class _Cluster:
    """One cluster's folder, and the environment in which its programs find each other."""

    run: Path
    environment: Mapping[str, str]

    def call(self, *command: str) -> None:
        """Runs a program to its end. Raises RuntimeError with its output if it fails or takes over a minute."""
        log = self.run / f"{command[0]}.log"
        with log.open("ab") as output:
            try:
                subprocess.run(
                    command, cwd=self.run, env=self.environment, stdout=output, stderr=output, timeout=60, check=True
                )
            except subprocess.SubprocessError as error:
                raise RuntimeError(f"{error}\n{_tail(log)}") from error

    @contextmanager
    def daemon(self, *command: str) -> Iterator[None]:
        """A program that runs meanwhile; it dies with the test process, however that ends.

        It is started again until it stays: an OSD gives up when its first command outruns the monitor's map.
        """
        stay = shlex.join(["setpriv", "--pdeathsig", "KILL", *command, "-f"])
        with (self.run / f"{command[0]}.log").open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "sh", "-c", f"until {stay}; do sleep 0.05; done"],
                cwd=self.run,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def running_ceph(run: Path, host: str = "127.0.0.1") -> Iterator[CephServer]:
    """A fresh cluster whose files lie in the empty folder `run`; its gateway listens at `host`.

    Raises CephUnavailable; RuntimeError if it fails.
    """
    root = _unpacked_packages()
    cluster, endpoint = _configure(run, root, host)
    with ExitStack() as daemons:
        cluster.call("ceph-mon", "-c", "ceph.conf", "--mkfs", "-i", "a", "--monmap", "monmap")
        daemons.enter_context(cluster.daemon("ceph-mon", "-c", "ceph.conf", "-i", "a"))
        cluster.call("ceph-osd", "-c", "ceph.conf", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        daemons.enter_context(cluster.daemon("ceph-osd", "-c", "ceph.conf", "-i", "0"))
        user = ("--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret-key={SECRET}")
        cluster.call("radosgw-admin", "-c", "ceph.conf", "-n", "client.rgw", "user", "create", *user)
        daemons.enter_context(cluster.daemon("radosgw", "-c", "ceph.conf", "-n", "client.rgw"))
        _wait_until_it_answers(endpoint, run / "radosgw.log")
        yield CephServer(endpoint=endpoint, key=KEY, secret=SECRET)


def _configure(run: Path, root: Path, host: str) -> tuple[_Cluster, str]:
    """Writes the cluster's configuration and first maps; the cluster, and its endpoint."""
    libraries = next(root.glob("usr/lib/*-linux-gnu"))
    path = (libraries, libraries / "ceph", root / "usr/lib", root / "lib" / libraries.name)
    cluster = _Cluster(
        run=run,
        environment={
            "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(str(folder) for folder in path),
        },
    )
    for folder in ("mon", "osd", "rgw"):
        (run / folder).mkdir()
    fsid, mon_port, s3_port = str(uuid.uuid4()), _free_port(), _free_port()
    config = CONFIG.format(
        fsid=fsid, mon_port=mon_port, s3_port=s3_port, host=host, run=run, root=root, libraries=libraries
    )
    (run / "ceph.conf").write_text(config)
    cluster.call("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", fsid, "monmap")
    return cluster, f"http://{host}:{s3_port}"


def _unpacked_packages() -> Path:
    """The folder that holds the packages' files, filled if need be. Raises CephUnavailable."""
    for tool in ("apt-get", "dpkg", "setpriv"):
        if shutil.which(tool) is None:
            raise CephUnavailable(f"Ceph comes in Debian packages, and this machine has no {tool}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "millrace-tests" / "ceph"
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / "root"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            unfinished = cache / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            for package in _download(cache / "packages"):
                subprocess.run(["dpkg", "-x", package, unfinished], check=True)
            unfinished.rename(root)
    return root


def _download(folder: Path) -> list[Path]:
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::Cache::archives={folder}", "-o", "Debug::NoLocking=1", "-o", "Acquire::Retries=2"]
    download = ["apt-get", "install", "-y", "--no-install-recommends", "--download-only", *options, *PACKAGES]
    for command in (download, ["apt-get", "update"], download):
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if command is download and ended.returncode == 0:
            return sorted(folder.glob("*.deb"))
    raise CephUnavailable(f"apt-get can't download {', '.join(PACKAGES)}: {ended.stdout.strip().splitlines()[-1]}")


def _wait_until_it_answers(endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    # Without a proxy: the server is on this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        try:
            direct.open(endpoint, timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{endpoint} does not answer\n{_tail(log)}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
