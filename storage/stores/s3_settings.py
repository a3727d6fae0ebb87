"""Endpoint, region and credentials of S3.

what           first                                 else                                   else
credentials    AWS_ACCESS_KEY_ID, AWS_SECRET_…       ~/.aws/credentials, ~/.aws/config      web identity, container,
               (AWS_SESSION_TOKEN)                   (profile AWS_PROFILE)                  instance: the library's
region         AWS_REGION, AWS_DEFAULT_REGION        region of the profile                  us-east-1
endpoint       AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL endpoint_url of the profile            Amazon's, by region
"""

import configparser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import StoreRefused

if TYPE_CHECKING:
    from obstore.store import S3Config


def read_settings(environment: Mapping[str, str]) -> "S3Config":
    """The settings in `environment` and the files it points to, for the library; it reads the rest itself.

    They contain secrets. Raises StoreRefused for a profile that does not exist and for an endpoint that is not a
    server's URL.
    """
    profile = _read_profile(environment)
    region = _first(environment, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region") or "us-east-1"
    # Conditional, whatever the environment says: the whole protocol depends on it.
    config: S3Config = {"region": region, "conditional_put": "etag"}
    if not environment.get("AWS_ACCESS_KEY_ID") and "aws_access_key_id" in profile:
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile.get("aws_secret_access_key", "")
        if "aws_session_token" in profile:
            config["session_token"] = profile["aws_session_token"]
    endpoint = _first(environment, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or profile.get("endpoint_url", "")
    if endpoint:
        config["endpoint"] = _checked_endpoint(endpoint)
    return config


def _read_profile(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Reads the user's profile from the files that Amazon's tools share; {} without one."""
    home = Path(environment.get("HOME", "~")).expanduser() / ".aws"
    credentials = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")).expanduser()
    settings = Path(environment.get("AWS_CONFIG_FILE", home / "config")).expanduser()
    name = environment.get("AWS_PROFILE", "default")
    profile: dict[str, str] = {}
    for file, section in ((settings, "default" if name == "default" else f"profile {name}"), (credentials, name)):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            # Without the error's text, which quotes the line: it may be a secret.
            raise StoreRefused(type(error).__name__, file=file, expected="AWS settings") from None
        if parser.has_section(section):
            profile.update(parser.items(section))
    if "AWS_PROFILE" in environment and not profile:
        raise StoreRefused(repr(name), file="AWS_PROFILE", expected=f"a profile of {credentials} or {settings}")
    return profile


def _checked_endpoint(endpoint: str) -> str:
    if re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d+)?(/[^?#@\s]*)?", endpoint):
        return endpoint.rstrip("/")
    # The text before an '@' or after a '?' may be a secret.
    shown = f"{'…@' if '@' in endpoint else ''}{endpoint.rpartition('@')[2].partition('?')[0]}"
    expected = "http:// or https://, a host, perhaps a port, and no credentials"
    raise StoreRefused(repr(shown), file="AWS_ENDPOINT_URL", expected=expected)


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
