"""Properties of a store on S3 alone: credentials, endpoint, and the meaning of the server's answers."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.stores.flaky_link import flaky_link
from support.stores.s3_server import S3Server, aws_environment
from support.stores.scripted_s3 import Reply, ScriptedS3, scripted_s3

from storage.errors import Fenced, StoreDenied, StoreFull, StoreRefused, StoreUnreachable
from storage.stores.base import Store, probe
from storage.stores.factory import open_store
from storage.stores.object_store import ObjectStore
from storage.streams.log import LogReader, LogWriter

SECRET = "hidden/+secret"
CREATED = Reply(200)
CONFLICT = Reply.error(409, "ConditionalRequestConflict")
RESET = Reply(0)
EXISTS = Reply.error(412, "PreconditionFailed")
DENIED = Reply.error(403, "AccessDenied")

EVERY_METHOD: list[Callable[[Store], object]] = [
    lambda store: store.get("a"),
    lambda store: store.get("a", 5, 10),
    lambda store: store.exists("a"),
    lambda store: store.put("a", b"x"),
    lambda store: store.put_if_absent("a", b"x"),
    lambda store: store.entries(),
    lambda store: store.delete("a"),
    lambda store: store.delete_tree("a"),
]


def said(error: BaseException) -> str:
    """All that a person may get to see of an error: one sentence, nothing secret in its traceback either."""
    shown = "".join(traceback.format_exception(error))
    assert SECRET not in shown
    assert "Debug source" not in shown
    sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 300
    return sentence


@contextmanager
def store_at(server: S3Server, url: str, **changed: str) -> Iterator[ObjectStore]:
    with aws_environment({**server.environment, **changed}):
        yield ObjectStore(url)


@contextmanager
def store_told(*replies: Reply) -> Iterator[tuple[ObjectStore, ScriptedS3]]:
    with scripted_s3(*replies) as server, store_at(server, "s3://bucket/run") as store:
        yield store, server


# ---- errors, on a real server


@pytest.mark.slow
@pytest.mark.ceph
@pytest.mark.parametrize("call", EVERY_METHOD)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "access key"),
        ({"AWS_SECRET_ACCESS_KEY": SECRET}, "secret key"),
    ],
)
def test_unknown_credentials_are_denied_by_every_method(
    ceph: S3Server, call: Callable[[Store], object], changed: dict[str, str], reason: str
) -> None:
    url = f"s3://{ceph.make_bucket()}/run"
    with store_at(ceph, url, **changed) as store, pytest.raises(StoreDenied) as denied:
        call(store)
    assert said(denied.value).startswith(f"{url}: ")
    assert reason in str(denied.value)


@pytest.mark.parametrize("call", EVERY_METHOD)
@pytest.mark.parametrize("server", ["moto_s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_a_missing_bucket_is_refused_by_every_method(
    request: pytest.FixtureRequest, server: str, call: Callable[[Store], object]
) -> None:
    url = "s3://no-such-bucket/run"
    with store_at(request.getfixturevalue(server), url) as store, pytest.raises(StoreRefused) as refused:
        call(store)
    assert said(refused.value).startswith(f"{url}: ")


@pytest.mark.ceph
def test_stores_in_one_bucket_are_separate(ceph: S3Server) -> None:
    bucket = ceph.make_bucket()
    with store_at(ceph, f"s3://{bucket}/one/") as store:
        neighbour, whole = ObjectStore(f"s3://{bucket}/one-more"), ObjectStore(f"s3://{bucket}")
        store.put("a", b"1")
        neighbour.put("a", b"22")
        assert (store.list(), neighbour.list()) == (["a"], ["a"])
        assert [(entry.path, entry.bytes) for entry in whole.entries()] == [("one-more/a", 2), ("one/a", 1)]
        assert (store.url, whole.url) == (f"s3://{bucket}/one", f"s3://{bucket}")
        assert store.local_path("a") is None


# ---- errors, without a server


@pytest.mark.slow
def test_a_closed_port_is_an_unreachable_store() -> None:
    closed = S3Server(endpoint="http://127.0.0.1:1", key="key", secret=SECRET)
    with store_at(closed, "s3://bucket/run") as store:
        with pytest.raises(StoreUnreachable) as unreachable:
            store.get("a")
        assert said(unreachable.value).startswith("s3://bucket/run: a: ")
        with pytest.raises(StoreRefused) as refused:
            probe(store)
        said(refused.value)


@pytest.mark.slow
def test_missing_credentials_are_denied_by_every_method() -> None:
    # No server answers at the address of Amazon's machine metadata.
    no_server = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    with aws_environment(no_server):
        store = open_store("s3://bucket/run")
        for call in EVERY_METHOD:
            with pytest.raises(StoreDenied) as denied:
                call(store)
            said(denied.value)
        with pytest.raises(StoreRefused):
            probe(store)


def test_a_credentials_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    container = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/who",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ENDPOINT_URL": "http://[::1]:1",
    }
    with aws_environment(container), pytest.raises(StoreDenied) as denied:
        open_store("s3://bucket/run").get("a")
    assert "127.0.0.1" in said(denied.value)


# ---- answers


@pytest.mark.parametrize(
    ("replies", "created"),
    [
        ([Reply.error(500, "InternalError"), EXISTS], False),
        ([CONFLICT, CONFLICT, CREATED], True),
        ([CONFLICT, CONFLICT, EXISTS], False),
    ],
    ids=["lost reply", "conflict, then created", "conflict, then exists"],
)
def test_a_create_is_retried_until_the_server_decides(replies: list[Reply], created: bool) -> None:
    with store_told(*replies) as (store, server):
        assert store.put_if_absent("a", b"x") is created
        assert server.asked == ["PUT /bucket/run/a *"] * len(replies)


@pytest.mark.slow
def test_a_create_whose_connection_breaks_is_retried() -> None:
    for last, created in ((CREATED, True), (EXISTS, False)):
        with store_told(CREATED, *[RESET] * 4, last) as (store, server):
            store.put("b", b"the store answers")
            assert store.put_if_absent("a", b"x") is created
            assert server.asked[1:] == ["PUT /bucket/run/a *"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost_request", "lost_reply", "cut_reply"])
@pytest.mark.parametrize("call", EVERY_METHOD)
def test_a_request_whose_connection_breaks_is_retried(
    moto_s3: S3Server, call: Callable[[Store], object], fault: str
) -> None:
    url = f"s3://{moto_s3.make_bucket()}/run"
    with flaky_link(moto_s3.endpoint, 0, {}) as link, store_at(moto_s3, url, AWS_ENDPOINT_URL=link.endpoint) as store:
        store.put("a", b"0123456789" * 10)
        first = call(store)
        link.strike_next(fault)
        assert call(store) == first
        assert link.fired == {fault: 1}


def test_a_create_without_an_answer_at_first_contact_is_an_error() -> None:
    with store_told(RESET) as (store, server):
        with pytest.raises(StoreUnreachable) as lost:
            store.put_if_absent("a", b"x")
        said(lost.value)
        assert server.asked == ["PUT /bucket/run/a *"] * 3


def test_a_record_whose_reply_is_lost_is_committed_once() -> None:
    objects: dict[str, bytes] = {}

    def answer(method: str, path: str, body: bytes) -> Reply:
        if method == "GET":
            return Reply(200, objects[path]) if path in objects else Reply.error(404, "NoSuchKey")
        if path in objects:
            return EXISTS
        objects[path] = body
        return RESET

    with scripted_s3(answer) as server, store_at(server, "s3://bucket/run") as store:
        zombie = LogWriter(store, "log", "zombie")
        assert zombie.commit("checkpoint", body={}).seq == 1
        assert LogWriter(store, "log", "successor").commit("end").seq == 3
        with pytest.raises(Fenced):
            zombie.commit("checkpoint", body={})
        assert [record.kind for record in iter(LogReader(store, "log").next, None)] == [
            "fence",
            "checkpoint",
            "fence",
            "end",
        ]
        assert len(objects) == 4


def test_a_large_object_is_created_by_one_conditional_request() -> None:
    with store_told(CREATED) as (store, server):
        assert store.put_if_absent("a", bytes(30_000_000))
        store.put("b", bytes(30_000_000))
        assert server.asked == ["PUT /bucket/run/a *", "PUT /bucket/run/b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "error", "part"),
    [
        (Reply.error(507, "XMinioStorageFull"), StoreFull, "507 XMinioStorageFull"),
        (Reply.error(403, "QuotaExceeded"), StoreFull, "403 QuotaExceeded"),
        (Reply.error(403, "AccessDenied"), StoreDenied, "403 AccessDenied"),
        (Reply.error(400, "ExpiredToken"), StoreDenied, "400 ExpiredToken"),
        (Reply(401), StoreDenied, "401"),
        (Reply.error(301, "PermanentRedirect"), StoreRefused, "AWS_REGION"),
        (Reply.error(400, "AuthorizationHeaderMalformed"), StoreRefused, "AWS_REGION"),
        (Reply.error(503, "SlowDown"), StoreUnreachable, "127.0.0.1"),
        (Reply.error(400, "EntityTooLarge"), OSError, "a: 400 EntityTooLarge"),
    ],
)
def test_an_s3_answer_becomes_an_error_of_one_line(reply: Reply, error: type[Exception], part: str) -> None:
    with store_told(reply) as (store, server):
        for write in (store.put, store.put_if_absent):
            with pytest.raises(error) as raised:
                write("a", b"x")
            assert type(raised.value) is error
            assert said(raised.value).startswith("s3://bucket/run: ")
            assert part in str(raised.value)
        assert server.asked


def test_a_read_that_breaks_off_is_continued_or_an_error() -> None:
    data = bytes(range(250)) * 4
    begun = Reply(200, data, sent=500)
    with store_told(begun, Reply(206, data[500:], content_range="bytes 500-999/1000")) as (store, server):
        assert store.get("a") == data
        assert len(server.asked) == 2
    with store_told(begun, Reply.error(400, "InvalidRequest")) as (store, server):
        with pytest.raises(OSError) as broken:
            store.get("a")
        said(broken.value)
        assert len(server.asked) == 2


def test_a_store_that_has_answered_once_is_retried_longer() -> None:
    ill = [Reply.error(503, "SlowDown")] * 4
    with store_told(*ill, CREATED) as (store, server):
        with pytest.raises(StoreUnreachable):
            store.put("a", b"x")
        assert len(server.asked) == 3
    with store_told(CREATED, *ill, CREATED) as (store, server):
        store.put("a", b"x")
        store.put("a", b"y")
        assert len(server.asked) == 6


def test_a_refused_deletion_is_an_error() -> None:
    refusal = b"<DeleteResult><Error><Key>run/a</Key><Code>AccessDenied</Code><Message/></Error></DeleteResult>"
    with store_told(Reply(200, refusal)) as (store, server):
        with pytest.raises(StoreDenied) as denied:
            store.delete("a")
        said(denied.value)
        assert server.asked == ["POST /bucket?delete"]


ABSENT = Reply.error(404, "NoSuchKey")
NOTHING = Reply(200, b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>")


@pytest.mark.parametrize(
    ("replies", "methods"), [([DENIED], ["GET"]), ([ABSENT, DENIED, NOTHING], ["GET", "PUT", "GET"])]
)
def test_the_probe_refuses_a_store_that_denies_reads_or_writes(replies: list[Reply], methods: list[str]) -> None:
    with store_told(*replies) as (store, server):
        with pytest.raises(StoreRefused) as refused:
            probe(store)
        said(refused.value)
        assert [request.split()[0] for request in server.asked] == methods


# ---- URLs


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/run",
        "s3://hidden@bucket/run",
        "s3://key:hidden?/+secret@bucket/run",
        "s3://key:hidden",
        "s3://bucket/run?secret=hidden",
        "s3://bucket/run#hidden",
    ],
)
def test_a_url_with_secrets_is_refused_without_showing_them(url: str) -> None:
    with aws_environment({}), pytest.raises(StoreRefused) as refused:
        open_store(url)
    assert "hidden" not in said(refused.value)
