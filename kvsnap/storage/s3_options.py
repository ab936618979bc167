"""Where a bucket is and how to speak to it: URL, options, environment, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvsnap.config import parse_size
from kvsnap.errors import ConfigError
from kvsnap.storage.base import is_valid_name
from kvsnap.storage.retry import RetryPolicy

MIB = 1 << 20
GIB = 1 << 30
MIN_RATE = 64 << 10
"""Slower, and stores take the silence for a dead client."""
MAX_THREADS = 64
"""Most shards at once that a command may be told to move."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_URL_KEYS = ("endpoint", "region", "profile", "addressing", "sse", "kms_key", "max_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach an S3 bucket. What is None comes from the AWS environment and configuration files."""

    endpoint: str | None = None
    """URL of a store other than AWS (else `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`)."""
    region: str | None = None
    """Else `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's."""
    profile: str | None = None
    """Of the AWS configuration files (else `AWS_PROFILE`)."""
    addressing: str | None = None
    """`path` or `virtual`; by default `path` for an endpoint of its own, else as botocore chooses."""
    sse: str | None = None
    """Encryption at rest asked for with each write: `AES256` (SSE-S3) or `aws:kms`; by default the bucket's."""
    kms_key: str | None = None
    """Key id or ARN for `aws:kms`; by default the account's."""
    threads: int = MAX_THREADS
    """Most requests at a time that find a connection waiting."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    """Longest silence of the store inside an answer."""
    single_put_bytes: int = 5 * GIB
    """Larger objects go in parts (5 GiB is the most that S3 takes in one)."""
    part_bytes: int = 64 * MIB
    """Of one part, which is held in memory; raised where 10,000 parts would not do."""
    max_rate: int | None = None
    """Most bytes of shards per second, up and down each; None: as fast as it goes. As text, for example `50MiB`."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        for name, allowed in (("addressing", (None, "path", "virtual")), ("sse", (None, "AES256", "aws:kms"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"S3 option {name} is {getattr(self, name)!r}, expected {' or '.join(str(x) for x in allowed[1:])}"
                )
        if self.kms_key is not None and self.sse != "aws:kms":
            raise ConfigError(f"S3 option kms_key is given, but sse is {self.sse!r}; set sse to aws:kms")
        if self.max_rate is not None and self.max_rate < MIN_RATE:
            raise ConfigError(f"S3 option max_rate is {self.max_rate} bytes per second, expected at least {MIN_RATE}")
        if self.endpoint is not None and urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise ConfigError(f"S3 endpoint {self.endpoint!r} is not valid; write http://host:port or https://host")

    def encryption(self) -> dict[str, str]:
        """Arguments of every request that writes."""
        found = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A bucket, and the start of all keys in it."""

    bucket: str
    prefix: str
    """Empty, or ends in a slash."""

    @property
    def url(self) -> str:
        """Without options."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_s3_url(url: str, options: Mapping[str, Any] | S3Options | None = None) -> tuple[S3Location, S3Options]:
    """Take `s3://bucket/prefix?endpoint=…&region=…&profile=…&addressing=…&sse=…&kms_key=…&max_rate=…` apart.

    `options` win over what the URL says.

    Raises:
        ConfigError: a wrong bucket, prefix or option.
    """
    parts = urlsplit(url)
    prefix = unquote(parts.path).strip("/")
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(f"URL {url} has no valid bucket name, expected s3://bucket/prefix")
    if "#" in url:
        raise ConfigError(f"URL {url} has a #, which no bucket, prefix or option has; write %23 in an option's value")
    if prefix and not is_valid_name(prefix):
        raise ConfigError(f"URL {url}: prefix {prefix!r:.100} is not valid; use plain segments joined by slashes")
    found: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _URL_KEYS:
            raise ConfigError(f"URL {url} has option {name!r}, expected one of {', '.join(_URL_KEYS)}")
        if not value or name in found:
            raise ConfigError(f"URL {url} has option {name} {'twice' if value else 'without a value'}")
        found[name] = value
    if isinstance(options, S3Options):
        base = options
        found = {name: value for name, value in found.items() if getattr(base, name) is None}
    else:
        base = S3Options()
        found |= options or {}
    known = {item.name for item in fields(S3Options)}
    if unknown := sorted(found.keys() - known):
        raise ConfigError(f"unknown S3 option {unknown[0]}, expected one of {', '.join(sorted(known))}")
    if "max_rate" in found:
        found["max_rate"] = parse_size(found["max_rate"])
    location = S3Location(bucket=parts.netloc, prefix=prefix + "/" if prefix else "")
    return location, replace(base, **found)


def make_client(options: S3Options) -> Any:
    """A boto3 client; may be used by any number of threads.

    Raises:
        ConfigError: boto3 isn't installed, or the profile, region or endpoint is wrong.
    """
    try:
        import boto3
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"S3 needs boto3 ({error}); run `pip install kvsnap[s3]`") from None

    endpoint = options.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    addressing = options.addressing or ("path" if endpoint else None)
    settings: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        # one quick retry by the SDK; patience is RetryStorage's, which spreads many clients better
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "max_pool_connections": options.threads,
        "tcp_keepalive": True,
        # kvsnap sends its own SHA-256 and checks all that it reads; trailers break stores that don't know them
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "kvsnap",
    }
    if addressing:
        settings["s3"] = {"addressing_style": addressing}
    try:
        core = botocore.session.Session(profile=options.profile)
        core.register_component("data_loader", _loader())
        session = boto3.Session(botocore_session=core)
        region = options.region or os.environ.get("AWS_REGION") or session.region_name
        if region is None and endpoint:
            region = "us-east-1"
        return session.client("s3", endpoint_url=endpoint, region_name=region, config=Config(**settings))
    except (BotoCoreError, ValueError, TypeError) as error:
        raise ConfigError(f"the S3 client can't be set up: {error}") from None


@cache
def _loader() -> Any:
    """botocore's descriptions of services: megabytes of JSON, the same for each client."""
    from botocore.loaders import create_loader

    return create_loader()
