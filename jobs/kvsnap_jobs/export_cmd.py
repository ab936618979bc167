"""kvsnap export"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from kvsnap.engines import namespaces_in_use
from kvsnap.export_rounds import ExportRound, ExportRounds, IsOwed
from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.rounds import Pace
from kvsnap.selection import SELECTS, Select
from kvsnap.signing import SigningKey
from kvsnap.snapshot_export import ExportReport, export_snapshot, match_namespaces
from kvsnap.storage import Storage, open_storage
from kvsnap.storage.stoppable import StoppableStorage
from kvsnap.transfer import Progress
from kvsnap_jobs.options import (
    EXIT_FAILED,
    EXIT_PROBLEMS,
    PACE,
    REPOSITORY_URL,
    SIZE,
    TAG,
    cache_dir_option,
    json_option,
    namespace_option,
    single_writer_option,
)
from kvsnap_jobs.output import ProgressBar, print_facts, print_json, print_json_line, size_text
from kvsnap_jobs.signals import stopped_by_signals
from kvsnap_jobs.trust_options import signing_key_option

Once = Callable[[str | Storage, ExportReport | None, IsOwed, Progress | None], ExportReport]
"""Exports to a storage; what came out last; whether the ref moves to a snapshot that isn't new; progress."""


@click.command()
@cache_dir_option()
@click.option(
    "--to", "url", metavar="URL", type=REPOSITORY_URL, required=True, help="The repository; made if nothing is there."
)
@namespace_option
@click.option("--tag", metavar="NAME", type=TAG, help="Make this ref name the snapshot. Without, no ref moves.")
@click.option("--max-bytes", metavar="SIZE", type=SIZE, help="Most bytes of shards, which go whole, the hottest first.")
@click.option(
    "--select",
    type=click.Choice(SELECTS),
    default="all",
    show_default=True,
    help="Which chunks: all; hot: those that were hit; recent: those used in the last 24 hours.",
)
@click.option("--salted", is_flag=True, help="Also chunks of tenants (requests with a cache salt) and LoRA adapters.")
@click.option(
    "--every", "every_s", metavar="DURATION", type=PACE,
    help="Go on until SIGTERM, and export again after each DURATION (as 10m), give or take a fifth.",
)  # fmt: skip
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
    every_s: float | None,
    no_flush: bool,
    key_file: Path | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Export the chunks of a cache directory to a repository, as a snapshot.

    Asks live engines to flush, then uploads the shards that the repository doesn't have
    yet and publishes a snapshot of exactly what was there at the call. A chunk goes
    along only with all its ancestors. If shards and chunks are those of an earlier
    snapshot, nothing is published and its id is printed. May be killed and repeated. Of
    what the repository has it compares sizes alone: kvsnap verify --read-data reads it.

    With --sign-key the manifest is signed before anybody sees it, and chunks that the
    repository has are relied on only where this key or a trusted one has signed them.

    Where DIR holds several namespaces (models) and --namespace chooses none, it is the one
    that live engines use.

    Prints the snapshot's id.

    With --every, what fails is said and tried again. --json then prints a line for each
    round, with the time of the last_successful_export. Several leaders may export to one
    ref: it moves to whatever is new, never back, so a roll back stands until then; a ref
    that is gone is made again. SIGTERM ends it cleanly, SIGKILL safely; the exit status is
    then that of the last round.

    \b
    Exit status:
      0  exported (or unchanged)
      1  it could not be exported (no chunk, no access, an engine did not flush)
      2  wrong usage; several namespaces, none chosen, and not just one of them in use: they are listed
      3  exported, but some shards of the cache directory are damaged and were left out; or not exported, since
         the repository is damaged (no id is printed then)
    """
    signer = None if key_file is None else SigningKey.read(key_file)

    def once(
        storage: str | Storage, last: ExportReport | None, moves_if_unchanged: IsOwed, progress: Progress | None
    ) -> ExportReport:
        matching = match_namespaces(cache_dir, namespace)
        chosen = namespaces_in_use(cache_dir, matching) if namespace is None and len(matching) > 1 else matching
        if len(chosen) != 1:
            lines = "".join(
                f"\n  {directory.name}  {ns.human.get('model') or ''}".rstrip() for directory, ns in matching
            )
            raise click.UsageError(f"{cache_dir} holds several namespaces; choose one with --namespace:{lines}")
        return export_snapshot(
            cache_dir,
            storage,
            namespace=chosen[0][1].id(),
            tag=tag,
            max_bytes=max_bytes,
            select=select,
            include_salted=salted,
            flush=not no_flush,
            single_writer=single_writer,
            moves_if_unchanged=moves_if_unchanged,
            last=last,
            signer=signer,
            progress=progress,
        )

    signed_by = None if signer is None else signer.public
    if every_s is not None:
        status = _export_every(every_s, url, tag, once, signed_by, as_json=as_json)
    else:
        with ProgressBar("export") as bar:
            report = once(url, None, lambda snapshot: True, bar)
        _warn(report)
        if as_json:
            print_json(report, signed_by=signed_by)
        else:
            click.echo(DIGEST_PREFIX + report.snapshot)
            _print_text(report, signed_by)
        status = EXIT_PROBLEMS if report.damaged else 0
    if status:
        ctx.exit(status)


def _export_every(
    every_s: float, url: str, tag: str | None, once: Once, signed_by: str | None, *, as_json: bool
) -> int:
    """Export until a signal comes; the exit status."""
    last: ExportRound | None = None

    def told(found: ExportRound) -> None:
        nonlocal last
        last = found
        if found.outcome == "failed":
            since = found.last_successful_export
            ago = "never since the start" if since is None else f"{time.time() - since:.0f} s ago"
            times = f"{found.failures} times in a row; " if found.failures > 1 else ""
            click.echo(f"kvsnap: export: {found.error} ({times}last success: {ago})", err=True)
        if found.report is not None:
            _warn(found.report)
        if as_json:
            print_json_line(found, signed_by=signed_by)
        elif found.report is not None and found.report.is_new:
            click.echo(DIGEST_PREFIX + found.report.snapshot)
            _print_text(found.report, signed_by)

    with stopped_by_signals() as stop, closing(StoppableStorage(open_storage(url, sleep=stop.sleep), stop)) as storage:
        rounds = ExportRounds(lambda last, moves: once(storage, last, moves, None), storage, tag, stop=stop)
        rounds.run(Pace(every_s), told)
    if last is None:
        return 0
    if last.outcome == "failed":
        return EXIT_PROBLEMS if last.is_refused else EXIT_FAILED
    return EXIT_PROBLEMS if last.report is not None and last.report.damaged else 0


def _warn(report: ExportReport) -> None:
    for problem in report.damaged:
        click.echo(f"kvsnap: {problem}", err=True)
    for engine, answer in report.flushed.items():
        if answer.get("unsaved_chunks"):
            count = answer["unsaved_chunks"]
            click.echo(f"kvsnap: engine {engine} holds {count} chunks in DRAM that it could not write", err=True)


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
            ("damaged", f"{len(report.damaged)} shards were left out" if report.damaged else None),
            ("vanished", f"{report.vanished} shards were evicted meanwhile" if report.vanished else None),
        ),
        indent="  ",
    )
