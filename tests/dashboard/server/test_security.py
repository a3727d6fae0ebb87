"""The guard decides who may read the dashboard: a Flask app behind it, and requests of browsers and strangers."""

import pytest
from flask import Flask
from flask.testing import FlaskClient
from support.pages.sites import LOCAL, TOKEN
from werkzeug.test import TestResponse

from dashboard.server.security import MAX_BODY_BYTES, MIN_TOKEN_LENGTH, TOKEN_VARIABLE, chosen_token, guard, is_loopback
from millrace.errors import InputError


def guarded(host: str = "127.0.0.1", token: str | None = None) -> FlaskClient:
    app = Flask("guarded")

    @app.get("/")
    @app.get("/run/live")
    def page() -> str:
        return "the page"

    @app.post("/_dash-update-component")
    def update() -> str:
        from flask import request

        return f"{len(request.get_data())} bytes"

    guard(app, host=host, token=token, script_hashes=["'sha256-abc'"])
    return app.test_client()


def seen(response: TestResponse) -> bool:
    return response.status_code == 200 and response.get_data(as_text=True) == "the page"


def test_only_addresses_that_others_can_reach_need_a_token() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost", "LOCALHOST"):
        assert is_loopback(host)
        assert chosen_token(host, None) is None
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", "", "localhost.example.org"):
        with pytest.raises(InputError):
            chosen_token(host, None)
        assert chosen_token(host, TOKEN) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_that_is_too_short_is_refused_wherever_it_listens_and_not_shown(host: str) -> None:
    short = "x" * (MIN_TOKEN_LENGTH - 1)
    with pytest.raises(InputError) as raised:
        chosen_token(host, short)
    assert short not in str(raised.value)


def test_the_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert chosen_token("0.0.0.0", None) == TOKEN
    assert chosen_token("127.0.0.1", None) == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost:8050", "[::1]:8050", "localhost", "127.0.0.1"])
def test_on_loopback_the_page_is_there_under_the_names_of_this_machine(host: str) -> None:
    assert seen(guarded().get("/", headers={"Host": host}))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8050", "127.0.0.1.evil.example", "localhost@evil.example", "[", "192.168.1.7"],
)
def test_on_loopback_another_sites_name_that_points_here_is_refused(host: str) -> None:
    response = guarded().get("/", headers={"Host": host})
    assert response.status_code == 403
    assert "the page" not in response.text


def test_behind_a_token_any_name_of_the_machine_will_do() -> None:
    headers = {"Host": "training-box:8050", "Authorization": f"Bearer {TOKEN}"}
    assert seen(guarded("0.0.0.0", TOKEN).get("/", headers=headers))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_answered(method: str) -> None:
    assert guarded().open("/", method=method, headers=LOCAL).status_code == 405


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer ünïcode-täken-xxxxxx".encode().decode("latin-1")},
        {"Cookie": f"millrace-80={TOKEN}"},
        {"Cookie": "millrace-80=" + "0" * 64},
    ],
)
def test_without_the_token_nothing_is_answered(wrong: dict[str, str]) -> None:
    client = guarded("127.0.0.1", TOKEN)
    response = client.get("/", headers={**LOCAL, **wrong})
    assert response.status_code == 401
    assert not seen(response)
    assert client.post("/_dash-update-component", json={}, headers={**LOCAL, **wrong}).status_code == 401


@pytest.mark.parametrize("query", ["token=", "token=wrong", f"token={TOKEN}x", "token=%ff%fe", "TOKEN=" + TOKEN])
def test_a_wrong_token_in_the_address_gets_no_cookie(query: str) -> None:
    response = guarded("127.0.0.1", TOKEN).get(f"/?{query}", headers=LOCAL)
    assert response.status_code == 401
    assert "Set-Cookie" not in response.headers


def test_the_token_in_the_address_is_asked_for_once_and_leaves_the_address() -> None:
    client = guarded("127.0.0.1", TOKEN)
    first = client.get(f"/run/live?token={TOKEN}", headers=LOCAL)
    assert first.status_code == 200
    assert 'content="0; url=?"' in first.text
    assert "the page" not in first.text
    assert TOKEN not in first.text
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert seen(client.get("/run/live", headers=LOCAL))


def test_a_cookie_of_another_token_opens_nothing() -> None:
    other = guarded("127.0.0.1", "another-token-as-long")
    cookie = other.get("/?token=another-token-as-long", headers=LOCAL).headers["Set-Cookie"].split(";")[0]
    headers = {**LOCAL, "Cookie": cookie}
    assert seen(other.get("/", headers=headers)), "the cookie that this test is about opens its own dashboard"
    assert guarded("127.0.0.1", TOKEN).get("/", headers=headers).status_code == 401


def test_a_body_beyond_the_limit_is_refused() -> None:
    client = guarded()
    at_limit = client.post("/_dash-update-component", data=b"x" * MAX_BODY_BYTES, headers=LOCAL)
    assert at_limit.text == f"{MAX_BODY_BYTES} bytes"
    beyond = client.post("/_dash-update-component", data=b"x" * (MAX_BODY_BYTES + 1), headers=LOCAL)
    assert beyond.status_code == 413


@pytest.mark.parametrize("headers", [LOCAL, {"Host": "evil.example"}])
def test_every_answer_also_a_refusal_tells_the_browser_to_run_nothing_else(headers: dict[str, str]) -> None:
    response = guarded().get("/", headers=headers)
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["script-src"] == "'self' 'sha256-abc'"
    assert policy["frame-ancestors"] == "'none'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
