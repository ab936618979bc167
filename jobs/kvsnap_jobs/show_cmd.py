"""kvsnap show"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.errors import ConfigError, CorruptChunkError
from kvsnap.manifest import DIGEST_PREFIX, Digest
from kvsnap.repository import Repository
from kvsnap.signing import read_signatures
from kvsnap.trust import TrustedKeys
from kvsnap_jobs.options import SNAPSHOT_URL, json_option
from kvsnap_jobs.output import print_facts, print_json, size_text
from kvsnap_jobs.trust_options import keys_to_trust, trust_options


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@trust_options
@json_option
def show(snapshot: tuple[str, str], require_signature: bool | None, trusted_keys: Path | None, as_json: bool) -> None:
    """Show what a snapshot is: its model, layout, shards and totals.

    Reads the manifest and its signatures only. --json prints the manifest itself, with the
    snapshot's id. Says of each signature whose it is, and refuses what no trusted key has
    signed only with --require-signature.

    \b
    Exit status:
      0  shown
      1  it could not be read (no such snapshot, no access)
      2  wrong usage
      3  its manifest is damaged or gone, needs a later kvsnap, or is not signed as required
    """
    url, ref = snapshot
    repository = Repository.open(url)
    trusted = keys_to_trust(require_signature, trusted_keys)
    digest, manifest = repository.open_snapshot(ref, trusted=trusted if require_signature else None)
    signatures = [] if require_signature is False else _signatures(repository, digest, trusted)
    if as_json:
        print_json(manifest.to_json(), snapshot=DIGEST_PREFIX + digest, signatures=signatures)
        return
    ns, totals = manifest.namespace, manifest.totals
    identity, layout = ns.identity, ns.layout
    click.echo(DIGEST_PREFIX + digest)
    print_facts(
        (
            ("created", manifest.created),
            ("writer", " ".join(str(manifest.writer.get(name, "")) for name in ("name", "version")).strip() or None),
            ("parent", manifest.parent and DIGEST_PREFIX + manifest.parent),
            ("model", manifest.model_id),
            ("revision", manifest.revision),
            ("weights", identity.weights),
            ("dtype", f"{identity.dtype}, KV {identity.kv_dtype}"),
            ("quantization", identity.quantization),
            ("identity tag", identity.identity_tag or None),
            ("identity", ns.identity_hash),
            ("layout", f"{ns.layout_hash[:12]}, {layout.world_size} ranks, {len(layout.slices)} slices"),
            ("tokens", f"{ns.chunk_tokens} in a chunk, {layout.block_tokens} in a block"),
            ("namespace", ns.dirname),
            ("holds", f"{totals.num_chunks} chunks, {totals.num_tokens} tokens, {totals.num_prefixes} prefixes"),
            ("shards", f"{len(manifest.shards)}, {size_text(totals.nbytes)}"),
            ("catalog", f"{DIGEST_PREFIX}{manifest.catalog.digest}, {size_text(manifest.catalog.nbytes)}"),
            *(("signature", f"{item['signer'] or str(item['key'])[:12]}: {item['verdict']}") for item in signatures),
            *((f"note {name}", value) for name, value in sorted(manifest.annotations.items())),
        ),
        indent="  ",
    )


def _signatures(repository: Repository, snapshot: Digest, trusted: TrustedKeys | None) -> list[dict[str, str | None]]:
    """Of each signature its key, the name that a trusted key has here, and what it is worth."""
    try:
        found = read_signatures(repository.storage, snapshot)
    except CorruptChunkError as error:
        return [{"key": "?", "signer": None, "verdict": str(error)}]
    data = repository.manifest_bytes(snapshot) if found else b""
    rows: list[dict[str, str | None]] = []
    for item in found:
        signer = None if trusted is None else trusted.name_of(item.key)
        try:
            verdict = ("good" if signer else "good, but the key is not trusted here") if item.is_good(data) else "wrong"
        except ConfigError as error:  # no cryptography
            verdict = f"not checked: {error}"
        rows.append({"key": item.key, "signer": signer, "verdict": verdict})
    return rows
