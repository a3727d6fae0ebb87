"""An S3 server on loopback, and an environment that points to it."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """Where a server is, and the key and secret of the user that may make buckets there."""

    endpoint: str
    key: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process reaches the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def make_bucket(self) -> str:
        """Makes an empty bucket; its new name."""
        # Late: it takes a while to import, and few tests need it.
        import boto3

        name = f"test-{uuid.uuid4().hex}"
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=REGION,
        )
        client.create_bucket(Bucket=name)
        return name


@contextmanager
def aws_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's AWS_* variables are `variables` and nothing else, and ~/.aws is not read."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    nobody = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    _replace_aws({**nobody, **variables})
    try:
        yield
    finally:
        _replace_aws(before)


def _replace_aws(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(variables)
