"""The meaning of an S3 error. The library's exception types say too little, so its text is parsed.

They don't distinguish a missing bucket from a missing object, a full store or a wrong region from another fault, or a
refused credential source from a refused request. They don't say why a connection failed.

Generic S3 error: Error performing GET http://host/bucket/key in 1ms - Server returned non-2xx status code:
403 Forbidden: <Error><Code>AccessDenied</Code>…                              ──► Answer ──► a storage error
                                                                                             of one sentence
Debug source: … HttpError { kind: Connect, … message: "Connection refused" …
"""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from storage.errors import NotInStore, StoreDenied, StoreFull, StoreRefused, StoreUnreachable

_DENIED = {
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "AccessDenied": "these credentials may not do this (where they may not list the bucket, an absent object looks so)",
}
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage")
_ELSEWHERE = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
IN_CONFLICT = ("ConditionalRequestConflict", "OperationAborted")
"""Codes while another request for the same name is in progress: whether an object exists is not decided yet."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One failed request."""

    request: str
    """URL of the request; '' if none was made, or if its reply was cut off."""
    status: int | None
    """HTTP status; None without an answer."""
    code: str
    """S3's error code; '' if there was none."""
    transport: str
    """Why the connection failed, in a word or two; '' if there was an answer."""
    summary: str
    """The library's first line, without URLs and bodies, for errors not known here."""

    @classmethod
    def of(cls, error: Exception) -> "Answer":
        """Parses the text of one of the library's errors; fields that are not found stay empty."""
        text, _, innards = str(error).partition("\n\nDebug source:")
        request = re.search(r"Error performing \S+ (\S+) in ", text)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>(\w+)</Code>|\(code: (\w+)\)", text)
        kind = re.search(r"HttpError \{\s*kind: (\w+)", innards)
        reason = re.search(r'message: "([^"]*)"', innards)
        return cls(
            request=request[1] if request else "",
            status=int(status[1]) if status else None,
            code=(code[1] or code[2]) if code else "",
            transport=reason[1] if kind and reason else kind[1].lower() if kind else "",
            summary=re.sub(r"\S+://\S+", "…", text.partition("<")[0].partition("\n")[0])[:200],
        )

    def is_lost(self, bucket: str) -> bool:
        """Whether the connection to the bucket's server broke, so that the request may have succeeded."""
        return self.status is None and self.transport != "" and (not self.request or self.went_to(bucket))

    def is_sound(self, bucket: str) -> bool:
        """Whether the bucket's server answered without an internal error."""
        return self.status is not None and self.status < 500 and self.went_to(bucket)

    def went_to(self, bucket: str) -> bool:
        """Whether the request was for the bucket rather than for credentials."""
        parts = urlsplit(self.request)
        return parts.path.startswith(f"/{bucket}") or (parts.hostname or "").startswith(f"{bucket}.")


def storage_error(answer: Answer, url: str, path: str, bucket: str) -> Exception:
    """The storage error for an `answer` about `path` in the store at `url`; an OSError if it is not known here."""
    shown = " ".join(str(part) for part in (answer.status, answer.code) if part) or answer.transport
    server = urlsplit(answer.request).netloc or "the server"
    if answer.request and not answer.went_to(bucket):
        expected = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return StoreDenied(f"no credentials came from {server} ({shown})", file=url, expected=expected)
    if answer.code == "NoSuchBucket":
        return StoreRefused("the bucket does not exist", file=url)
    if answer.code in _FULL or answer.status == 507:
        return StoreFull(f"no room left to write {path} ({shown})", file=url)
    if answer.code in _ELSEWHERE or "Received redirect without LOCATION" in answer.summary:
        expected = "its own in AWS_REGION, or AWS_ENDPOINT_URL"
        return StoreRefused("the bucket lies in another region", file=url, expected=expected)
    if answer.status in (401, 403) or answer.code in _DENIED:
        return StoreDenied(f"{path}: {_DENIED.get(answer.code, 'access denied')} ({shown})", file=url)
    if answer.status == 404:
        return NotInStore(f"not in {url}", file=path)
    if answer.transport or answer.status == 429 or (answer.status or 0) >= 500:
        return StoreUnreachable(f"{path}: no good answer from {server} ({shown})", file=url)
    return OSError(f"{url}: {path}: {shown or answer.summary}")
