"""kvsnap show"""

from __future__ import annotations

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.repository import Repository
from kvsnap_jobs.options import SNAPSHOT_URL, json_option
from kvsnap_jobs.output import print_facts, print_json, size_text


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@json_option
def show(snapshot: tuple[str, str], as_json: bool) -> None:
    """Show what a snapshot is: its model, layout, shards and totals.

    Reads the manifest only. --json prints the manifest itself, with the snapshot's id.

    \b
    Exit status:
      0  shown
      1  it could not be read (no such snapshot, no access)
      2  wrong usage
      3  its manifest is damaged, or needs a later kvsnap
    """
    url, ref = snapshot
    repository = Repository.open(url)
    digest = repository.resolve(ref)
    manifest = repository.manifest(digest)
    if as_json:
        print_json(manifest.to_json(), snapshot=DIGEST_PREFIX + digest)
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
            *((f"note {name}", value) for name, value in sorted(manifest.annotations.items())),
        ),
        indent="  ",
    )
