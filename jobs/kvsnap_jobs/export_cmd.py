"""kvsnap export"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.selection import SELECTS, Select
from kvsnap.signing import SigningKey
from kvsnap.snapshot_export import ExportReport, export_snapshot, match_namespaces
from kvsnap_jobs.options import EXIT_PROBLEMS, SIZE, cache_dir_option, json_option, namespace_option
from kvsnap_jobs.output import ProgressBar, print_facts, print_json, size_text
from kvsnap_jobs.repository_options import single_writer_option
from kvsnap_jobs.trust_options import signing_key_option


@click.command()
@cache_dir_option()
@click.option("--to", "url", metavar="URL", required=True, help="The repository; made if nothing is there.")
@namespace_option
@click.option("--tag", metavar="NAME", help="Make this ref name the snapshot. Without, no ref moves.")
@click.option("--max-bytes", metavar="SIZE", type=SIZE, help="Most bytes of shards, the hottest first.")
@click.option(
    "--select",
    type=click.Choice(SELECTS),
    default="all",
    show_default=True,
    help="Which chunks: all; hot: those that were hit; recent: those used in the last 24 hours.",
)
@click.option("--salted", is_flag=True, help="Also chunks of requests with a cache salt (they belong to a tenant).")
@click.option("--no-flush", is_flag=True, help="Don't ask live engines to write their DRAM tier first.")
@signing_key_option("--sign-key")
@single_writer_option
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    cache_dir: Path,
    url: str,
    namespace: str | None,
    tag: str | None,
    max_bytes: int | None,
    select: Select,
    salted: bool,
    no_flush: bool,
    key_file: Path | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Export the chunks of a cache directory to a repository, as a snapshot.

    Asks live engines to flush, then uploads the shards that the repository doesn't have
    yet and publishes a snapshot of exactly what was there at the call. A chunk goes
    along only with all its ancestors. If shards and chunks are those of an earlier
    snapshot, nothing is published and its id is printed. May be killed and repeated.

    With --sign-key the manifest is signed before anybody sees it, and chunks that the
    repository has are relied on only where this key or a trusted one has signed them.

    Prints the snapshot's id.

    \b
    Exit status:
      0  exported (or unchanged)
      1  it could not be exported (no chunk, no access, an engine did not flush)
      2  wrong usage; several namespaces and none chosen: they are listed
      3  exported, but some shards of the cache directory are damaged and were left out
    """
    signer = None if key_file is None else SigningKey.read(key_file)
    matching = match_namespaces(cache_dir, namespace)
    if len(matching) > 1:
        lines = "".join(f"\n  {directory.name}  {ns.human.get('model') or ''}".rstrip() for directory, ns in matching)
        raise click.UsageError(f"{cache_dir} holds several namespaces; choose one with --namespace:{lines}")
    with ProgressBar("export") as bar:
        report = export_snapshot(
            cache_dir,
            url,
            namespace=namespace,
            tag=tag,
            max_bytes=max_bytes,
            select=select,
            include_salted=salted,
            flush=not no_flush,
            single_writer=single_writer,
            signer=signer,
            progress=bar,
        )
    for problem in report.damaged:
        click.echo(f"kvsnap: {problem}", err=True)
    for engine, answer in report.flushed.items():
        if answer.get("unsaved_chunks"):
            count = answer["unsaved_chunks"]
            click.echo(f"kvsnap: engine {engine} holds {count} chunks in DRAM that it could not write", err=True)
    if as_json:
        print_json(report, signed_by=None if signer is None else signer.public)
    else:
        click.echo(DIGEST_PREFIX + report.snapshot)
        _print_text(report, None if signer is None else signer.public)
    if report.damaged:
        ctx.exit(EXIT_PROBLEMS)


def _print_text(report: ExportReport, signed_by: str | None) -> None:
    left_out = [
        f"{count} {why}"
        for count, why in (
            (report.num_broken, "lack an ancestor"),
            (report.num_salted, "are salted"),
            (report.num_unselected, "were not selected or do not fit"),
        )
        if count
    ]
    print_facts(
        (
            ("published", "yes" if report.is_new else "no, the repository has this snapshot already"),
            ("ref", report.tag),
            ("signed by", signed_by),
            ("holds", f"{report.num_chunks} chunks, {report.num_tokens} tokens, {report.num_prefixes} prefixes"),
            ("shards", f"{report.num_shards}, {size_text(report.nbytes)}"),
            ("sent", f"{report.sent_shards} shards, {size_text(report.sent_bytes)}"),
            ("left out", "chunks: " + ", ".join(left_out) if left_out else None),
            ("vanished", f"{report.vanished} shards were evicted meanwhile" if report.vanished else None),
        ),
        indent="  ",
    )
