"""kvsnap sign"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.signing import SigningKey, sign_snapshot
from kvsnap_jobs.options import SNAPSHOT_URL, json_option, single_writer_option
from kvsnap_jobs.output import print_facts, print_json
from kvsnap_jobs.trust_options import signing_key_option


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@signing_key_option("--key", required=True)
@single_writer_option
@json_option
def sign(snapshot: tuple[str, str], key_file: Path, single_writer: bool, as_json: bool) -> None:
    """Sign a snapshot that is in a repository.

    The signature covers the manifest, and by the digests in it the catalog, the shards and
    every chunk. It says that you vouch for the snapshot as it was exported: name it by its
    id rather than by a ref that others can move. `kvsnap export --sign-key` signs while
    the bytes are still your own.

    Only the manifest is read, so whether all parts are there says `kvsnap verify`.

    The public key that is printed belongs into the trusted keys file of those who import.

    \b
    Exit status:
      0  signed (or signed already by this key)
      1  it could not be signed (no such snapshot, no access, a wrong key file)
      2  wrong usage
      3  its manifest is damaged, or needs a later kvsnap
    """
    url, ref = snapshot
    report = sign_snapshot(url, ref, SigningKey.read(key_file), single_writer=single_writer)
    if as_json:
        print_json(report)
        return
    click.echo(DIGEST_PREFIX + report.snapshot)
    print_facts((("signed", "yes" if report.is_new else "already"), ("public key", report.key)), indent="  ")
