"""kvsnap clear"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.clear import TIERS, Tier, clear_tiers
from kvsnap_jobs.options import cache_dir_option, dram_dir_option, json_option, namespace_option
from kvsnap_jobs.output import print_facts, print_json, size_text


@click.command()
@cache_dir_option()
@click.option("--tier", type=click.Choice(TIERS), required=True, help="Which tier to empty.")
@namespace_option
@dram_dir_option
@click.option("--dry-run", is_flag=True, help="Show what would go; remove nothing.")
@json_option
def clear(cache_dir: Path, tier: Tier, namespace: str | None, dram_dir: Path, dry_run: bool, as_json: bool) -> None:
    """Remove all chunks of a tier, of all namespaces or of one.

    Live engines empty their own tiers and go on serving; of what is at rest the files
    are removed. Chunks that an engine is just copying go once the copy has ended.

    \b
    Exit status:
      0  the tier is empty (or with --dry-run: shown)
      1  it could not be cleared (no such directory, an engine did not answer)
      2  wrong usage
    """
    report = clear_tiers(cache_dir, tier, namespace=namespace, dram_dir=dram_dir, dry_run=dry_run)
    if as_json:
        print_json(report)
        return
    verb = "would remove" if dry_run else "removed"
    if tier != "dram":
        click.echo(f"{verb} {report.disk_shards} shards at rest, {size_text(report.disk_bytes)}")
    if tier != "disk":
        memory = size_text(report.dram_bytes)
        click.echo(f"{verb} {report.dram_files} DRAM files at rest, {report.dram_chunks} chunks, {memory}")
    for engine, answer in report.engines.items():
        click.echo(f"engine {engine} {'holds' if dry_run else 'removed'}")
        print_facts(((name, value) for name, value in answer.items() if not isinstance(value, dict)), indent="  ")
