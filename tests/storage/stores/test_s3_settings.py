"""Endpoint and credentials of S3: environment variables first, then the user's AWS files."""

import os
from pathlib import Path

import pytest
from support.stores.s3_server import S3Server, aws_environment

from storage.errors import NotInStore, StoreRefused
from storage.stores.base import probe
from storage.stores.factory import open_store
from storage.stores.s3_settings import read_settings

SECRET = "hidden/+secret"
NOWHERE = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


@pytest.mark.parametrize("endpoint", [f"http://key:{SECRET}@host", "host:9000", "ftp://host", "http://host?x=hidden"])
def test_an_invalid_endpoint_is_refused_without_showing_it(endpoint: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        read_settings({**NOWHERE, "AWS_ENDPOINT_URL": endpoint})
    assert "hidden" not in str(refused.value)


def test_a_profile_fills_in_missing_environment_variables(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = %1\n"
        "[work]\naws_access_key_id = two\naws_secret_access_key = %2\naws_session_token = t\n"
    )
    (tmp_path / "config").write_text("[default]\nregion = eu-west-1\n[profile work]\nendpoint_url = http://host:1/\n")
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }
    mine = read_settings(files)
    assert mine["access_key_id"] == "one"
    assert mine["secret_access_key"] == "%1"
    assert mine["region"] == "eu-west-1"
    work = read_settings({**files, "AWS_PROFILE": "work", "AWS_REGION": "eu-north-1"})
    assert (work["access_key_id"], work["session_token"]) == ("two", "t")
    assert (work["endpoint"], work["region"]) == ("http://host:1", "eu-north-1")
    named = read_settings({**files, "AWS_ACCESS_KEY_ID": "three"})
    assert "access_key_id" not in named
    with pytest.raises(StoreRefused):
        read_settings({**files, "AWS_PROFILE": "elsewhere"})


def test_an_unreadable_settings_file_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(SECRET)
    with pytest.raises(StoreRefused) as refused:
        read_settings({**NOWHERE, "AWS_SHARED_CREDENTIALS_FILE": str(file)})
    assert SECRET not in str(refused.value)


def test_the_default_is_amazon_without_credentials() -> None:
    settings = read_settings(NOWHERE)
    assert "endpoint" not in settings
    assert settings["region"] == "us-east-1"
    assert settings["conditional_put"] == "etag"


@pytest.mark.ceph
def test_credentials_of_a_profile_open_a_store(ceph: S3Server, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id={ceph.key}\naws_secret_access_key={ceph.secret}\n"
    )
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_ENDPOINT_URL": ceph.endpoint,
    }
    with aws_environment(files):
        store = open_store(f"s3://{ceph.make_bucket()}")
        probe(store)
        with pytest.raises(NotInStore):
            store.get("a")
