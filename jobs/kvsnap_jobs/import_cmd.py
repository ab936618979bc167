"""kvsnap import"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.snapshot_import import ImportReport, import_snapshot
from kvsnap_jobs.options import EXIT_PROBLEMS, SIZE, SNAPSHOT_URL, cache_dir_option, json_option, other_engines_option
from kvsnap_jobs.output import ProgressBar, print_facts, print_json, size_text
from kvsnap_jobs.trust_options import keys_to_trust, trust_options


@click.command("import")
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@cache_dir_option()
@click.option(
    "--max-bytes", metavar="SIZE", type=SIZE,
    help="Most bytes, the hottest first: whole shards, and the start of one more.",
)  # fmt: skip
@click.option("--partial", is_flag=True, help="Import what is whole of a damaged snapshot instead of refusing it.")
@other_engines_option
@click.option("--dry-run", is_flag=True, help="Check everything that can be checked beforehand; touch nothing.")
@trust_options
@json_option
@click.pass_context
def import_(
    ctx: click.Context,
    snapshot: tuple[str, str],
    cache_dir: Path,
    max_bytes: int | None,
    partial: bool,
    other_engines: bool,
    dry_run: bool,
    require_signature: bool | None,
    trusted_keys: Path | None,
    as_json: bool,
) -> None:
    """Import a snapshot into the disk tier of a cache directory.

    Each shard is copied, hashed and checked before it becomes visible; the hottest come
    first, and a chunk never without its ancestors. A snapshot that is damaged, or that
    none of the live engines of DIR could use, is refused, and nothing is touched (what
    shows only while a shard is read ends the import; what is there then is a valid
    part). What DIR has already is not read again: kvsnap verify --cache-dir does that.
    With --other-engines it may be for engines that are still to come, as in a deploy of
    another model beside the old one. The cap of DIR holds. Live engines notice new shards
    by themselves. May be killed and repeated. Where trusted keys are installed, one of
    them must have signed it.

    \b
    Exit status:
      0  imported, or there already
      1  it could not be imported (no such snapshot, no access, the disk failed)
      2  wrong usage
      3  it is damaged, made for another engine, or not signed as required; or nothing fits under --max-bytes or the
         cap of DIR; with --partial: some of it was left out
    """
    url, ref = snapshot
    trusted = keys_to_trust(require_signature, trusted_keys)
    with ProgressBar("import") as bar:
        report = import_snapshot(
            url,
            ref,
            cache_dir,
            max_bytes=max_bytes,
            allow_partial=partial,
            other_engines=other_engines,
            dry_run=dry_run,
            trusted=trusted,
            progress=bar,
        )
    for problem in report.problems:
        click.echo(f"kvsnap: {problem}", err=True)
    tell_left_out(report, cache_dir)
    if as_json:
        print_json(report, dry_run=dry_run)
    else:
        click.echo(report.directory)
        tokens = f"{report.num_chunks} of {report.total_chunks} chunks, {report.num_tokens} tokens"
        print_facts(
            (
                ("would hold" if dry_run else "holds", tokens),
                ("would fetch" if dry_run else "fetched", _shards(report.imported_shards, report.imported_bytes)),
                ("there already", f"{report.present_shards} shards" if report.present_shards else None),
                ("snapshot", _shards(report.total_shards, report.total_bytes)),
                ("used by", ", ".join(report.engines) or None),
            ),
            indent="  ",
        )
    if report.problems or not report.num_chunks:
        ctx.exit(EXIT_PROBLEMS)


def tell_left_out(report: ImportReport, cache_dir: Path) -> None:
    """Say on stderr what a bound kept out."""
    if not report.chosen_shards:
        click.echo("kvsnap: no chunk of the snapshot fits under --max-bytes", err=True)
    if report.is_full:
        click.echo(f"kvsnap: the cap of {cache_dir} is reached; the rest of the snapshot was left out", err=True)


def _shards(count: int, nbytes: int) -> str:
    return f"{count} shards, {size_text(nbytes)}"
