"""kvsnap flush"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.engines import FLUSH_TIMEOUT_S, flush_engines
from kvsnap.errors import NotFoundError, StorageError
from kvsnap.snapshot_export import match_namespaces
from kvsnap_jobs.options import EXIT_PROBLEMS, cache_dir_option, json_option, namespace_option
from kvsnap_jobs.output import print_facts, print_json


@click.command()
@cache_dir_option()
@namespace_option
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=float, default=FLUSH_TIMEOUT_S, show_default=True,
    help="How long each engine may write.",
)  # fmt: skip
@json_option
@click.pass_context
def flush(ctx: click.Context, cache_dir: Path, namespace: str | None, timeout_s: float, as_json: bool) -> None:
    """Have the live engines of a cache directory write to disk what only their DRAM holds.

    \b
    Exit status:
      0  all of them wrote everything that may be written
      1  there is no live engine, or one did not answer
      2  wrong usage
      3  an engine answered, but has chunks that it could not write, or not in time
    """
    answers = {}
    failed: list[str] = []
    for _, ns in match_namespaces(cache_dir, namespace):
        try:
            answers.update(flush_engines(cache_dir, ns.id(), timeout_s=timeout_s))
        except StorageError as error:  # the engines of other models all the same
            failed.append(str(error))
    if failed:
        raise StorageError("; ".join(failed))
    if not answers:
        raise NotFoundError(f"no live engine uses {cache_dir}; what is there at rest needs no flush")
    if as_json:
        print_json({"engines": answers})
    else:
        for engine, answer in answers.items():
            click.echo(f"engine {engine}")
            print_facts(answer.items(), indent="  ")
    if any(answer.get("unsaved_chunks") for answer in answers.values()):
        ctx.exit(EXIT_PROBLEMS)
