"""A store in a bucket of S3, or of a server that speaks its language.

    put_if_absent   PUT, If-None-Match: *   ──► 200 True    ──► 412 False    ──► 409 in conflict: ask again
    put             PUT                         one request each, never a multipart upload, which would check
                                                the condition too late: objects are limited to 5 GB
    get, exists     GET, of a range or of all   404 NoSuchKey: not there;    404 NoSuchBucket, 403: errors

A request whose reply is lost is repeated. The library does so if the connection breaks before the reply, unless the
request is conditional or a POST; this store does so in all other cases, such as a reply that is cut off. If the first
try created the object, the next one finds it there, so False can mean "it was me": whatever is committed has a unique
name or nonce, and is read back.

Without the permission s3:ListBucket, S3 answers 403 for an absent object. "Not yet" looks like "forbidden" there, so
`probe` refuses such a store.
"""

import itertools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from storage.errors import NotInStore, StoreRefused, StoreUnreachable
from storage.failpoints import failpoint
from storage.stores.base import TEMPORARY_PREFIX, BytesLike, Entry, Store, checked_path
from storage.stores.s3_answers import IN_CONFLICT, Answer, storage_error
from storage.stores.s3_settings import read_settings

T = TypeVar("T")


class _Patience(NamedTuple):
    """How long requests are retried before an error is raised. Signals are handled only after that."""

    retries: int
    retry_seconds: int
    """A request is not retried after this long."""
    silence_seconds: int
    """Read timeout; it also covers our uploads, during which the server is silent."""


_FIRST_CONTACT = _Patience(retries=2, retry_seconds=3, silence_seconds=10)
"""Until the store has answered once: a wrong endpoint is a user error, and the user is waiting."""
_RUNNING = _Patience(retries=100, retry_seconds=30, silence_seconds=30)
"""Afterwards: a server that restarts is worth waiting for."""
_LARGE = _Patience(retries=100, retry_seconds=30, silence_seconds=3600)
"""For uploads above `_LARGE_FROM_BYTES`."""
_LARGE_FROM_BYTES = 8 << 20
_PAUSE_SECONDS = 0.5
"""Between two tries of a request whose connection broke."""
_CONFLICTS = 100
"""Most retries of a create, `poll_seconds` apart, while another request for its name is in progress."""


class ObjectStore(Store):
    """`s3://bucket/prefix`: objects are those of the bucket whose keys begin with `prefix/`.

    Settings come from the environment (`storage.stores.s3_settings`). Opening makes no request. Raises StoreRefused
    for a URL that is not of that form, and BadName for a prefix that is not a plain path.
    """

    poll_seconds = 0.05

    def __init__(self, url: str) -> None:
        self._bucket, self._prefix = _parse(url)
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._config = read_settings(os.environ)
        self._clients: dict[_Patience, S3Store] = {}
        self._answered = False

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        checked_path(path)
        failpoint("put.before", path)
        created = self._create(path, data)
        if created:
            failpoint("put.after", path)
        return created

    def put(self, path: str, data: BytesLike) -> None:
        checked_path(path)
        failpoint("put.before", path)
        self._ask(path, lambda: self._client(len(data)).put(path, _as_bytes(data), use_multipart=False), len(data))
        failpoint("put.after", path)

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        checked_path(path)
        return self._ask(path, lambda: self._get(path, start, length))[:length]

    def exists(self, path: str) -> bool:
        try:
            # Not HEAD: its answers have no body, so a bucket that does not exist would look like an absent object.
            self.get(path, length=1)
        except NotInStore:
            return False
        return True

    def entries(self, prefix: str = "") -> list[Entry]:
        entries = [
            Entry(path=path, bytes=size, t_modified=t_modified)
            for path, size, t_modified in self._walk(prefix)
            if not path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
        ]
        return sorted(entries, key=lambda entry: entry.path)

    def folders(self, prefix: str = "") -> list[str]:
        if prefix:
            checked_path(prefix)
        paths = self._ask(
            prefix or "its root", lambda: self._client().list_with_delimiter(prefix or None)["common_prefixes"]
        )
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, path: str) -> None:
        checked_path(path)
        self._ask(path, lambda: self._client().delete(path))

    def delete_tree(self, prefix: str) -> None:
        paths = [path for path, _, _ in self._walk(checked_path(prefix))]
        if paths:
            self._ask(prefix, lambda: self._client().delete(paths))

    def local_path(self, path: str) -> None:
        return None

    def _create(self, path: str, data: BytesLike) -> bool:
        def create() -> None:
            self._client(len(data)).put(path, _as_bytes(data), mode="create", use_multipart=False)

        for _ in range(_CONFLICTS):
            try:
                self._ask(path, create, len(data))
                return True
            except AlreadyExistsError as error:
                if Answer.of(error).code not in IN_CONFLICT:
                    return False
            time.sleep(self.poll_seconds)
        raise StoreUnreachable(f"another request for {path} has been in progress all the time", file=self.url)

    def _get(self, path: str, start: int, length: int | None) -> memoryview:
        try:
            if length is not None:
                # No range of HTTP is empty.
                return memoryview(self._client().get_range(path, start=start, length=max(length, 1)))
            if start > 0:
                return memoryview(self._client().get(path, options={"range": {"offset": start}}).bytes())
            return memoryview(self._client().get(path).bytes())
        except BaseError as error:
            # The object exists but ends before the range.
            if Answer.of(error).status != 416:
                raise
            return memoryview(b"")

    def _walk(self, prefix: str) -> list[tuple[str, int, float]]:
        """Path, bytes and time of modification of every object below the folder `prefix`, in no order."""
        if prefix:
            checked_path(prefix)

        def walk() -> list[tuple[str, int, float]]:
            return [
                (entry["path"], entry["size"], entry["last_modified"].timestamp())
                for chunk in self._client().list(prefix or None, chunk_size=1000)
                for entry in chunk
            ]

        return self._ask(prefix or "its root", walk)

    def _ask(self, path: str, ask: Callable[[], T], upload_bytes: int = 0) -> T:
        """Call `ask` until the store answers or patience runs out. Returns its result.

        Turns the library's errors into ours, except "exists already".
        """
        patience = self._patience(upload_bytes)
        deadline = time.monotonic() + patience.retry_seconds
        for num_retries in itertools.count():
            try:
                result = ask()
            except AlreadyExistsError:
                self._answered = True
                raise
            except (BaseError, FileNotFoundError) as error:
                answer = Answer.of(error)
                is_final = num_retries == patience.retries or time.monotonic() > deadline
                if is_final or not answer.is_lost(self._bucket):
                    self._answered = self._answered or answer.is_sound(self._bucket)
                    # The library's own text says the same at the length of a page.
                    raise storage_error(answer, self.url, path, self._bucket) from None
                time.sleep(_PAUSE_SECONDS)
            else:
                self._answered = True
                return result
        raise AssertionError("the loop ends by a result or an error")

    def _patience(self, upload_bytes: int) -> _Patience:
        return _LARGE if upload_bytes > _LARGE_FROM_BYTES else _RUNNING if self._answered else _FIRST_CONTACT

    def _client(self, upload_bytes: int = 0) -> S3Store:
        patience = self._patience(upload_bytes)
        if patience not in self._clients:
            self._clients[patience] = S3Store(
                self._bucket,
                prefix=self._prefix or None,
                config=self._config,
                client_options={
                    "allow_http": self._config.get("endpoint", "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=3),
                    "read_timeout": timedelta(seconds=patience.silence_seconds),
                    # For a whole response, which may be 5 GB.
                    "timeout": timedelta(hours=1),
                },
                retry_config={
                    "max_retries": patience.retries,
                    "retry_timeout": timedelta(seconds=patience.retry_seconds),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=2),
                        "base": 2,
                    },
                },
            )
        return self._clients[patience]


def _as_bytes(data: BytesLike) -> memoryview:
    """Casts to unsigned bytes: the library mistakes a view of signed ones, such as Arrow's, for a list of numbers."""
    return memoryview(data).cast("B")


def _parse(url: str) -> tuple[str, str]:
    """Bucket and prefix of an s3:// URL. No part of the message is one that may be a secret."""
    rest = url.partition("://")[2]
    authority = re.split(r"[/?#]", rest)[0]
    expected = "s3://bucket/prefix, and credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if "@" in authority or ":" in authority:
        shown = f"…@{rest.rpartition('@')[2]}" if "@" in rest else "…"
        raise StoreRefused("URLs are printed and stored", file=f"s3://{re.split(r'[?#]', shown)[0]}", expected=expected)
    bucket, _, prefix = rest.partition("/")
    if "?" in rest or "#" in rest or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket):
        shown = re.split(r"[?#]", rest)[0]
        raise StoreRefused("not a URL of a bucket", file=f"s3://{shown}", expected=expected)
    prefix = prefix.strip("/")
    return bucket, checked_path(prefix) if prefix else ""
