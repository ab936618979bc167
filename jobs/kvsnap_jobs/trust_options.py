"""What the commands that check signatures share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvsnap.errors import ConfigError
from kvsnap.trust import ENVIRONMENT, TrustedKeys, installed_keys, read_trusted_keys

F = TypeVar("F", bound=Callable[..., Any])


def trust_options(function: F) -> F:
    """`--require-signature`, `--trusted-keys FILE`"""
    function = click.option(
        "--trusted-keys",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Public keys whose signatures count.  [default: "
        f"${ENVIRONMENT}, else kvsnap/trusted_keys in the user's configuration folder]",
    )(function)
    return click.option(
        "--require-signature/--no-require-signature",
        default=None,
        help="Refuse a snapshot that no trusted key has signed.  [default: if there are trusted keys]",
    )(function)


def signing_key_option(name: str, *, required: bool = False) -> Callable[[F], F]:
    """An option `name` for the file of a private key."""
    return click.option(
        name,
        "key_file",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        required=required,
        help="Sign the manifest with this private key (Ed25519, PEM).",
    )


def keys_to_trust(require_signature: bool | None, file: Path | None) -> TrustedKeys | None:
    """The keys of which one must have signed; None: anything goes.

    Raises:
        ConfigError: signatures are required and there are no trusted keys; the file makes no sense.
    """
    if require_signature is False:
        if file is not None:
            raise click.UsageError("--trusted-keys and --no-require-signature contradict each other")
        return None
    trusted = installed_keys() if file is None else read_trusted_keys(file)
    if trusted is None and require_signature:
        raise ConfigError("a signature is required, but there are no trusted keys; name a file with --trusted-keys")
    return trusted
