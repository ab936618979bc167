"""kvsnap status"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvsnap.status import DramFileStatus, StatusReport, read_status
from kvsnap_jobs.options import cache_dir_option, dram_dir_option, json_option
from kvsnap_jobs.output import print_facts, print_json, size_text, time_text


@click.command()
@cache_dir_option()
@dram_dir_option
@json_option
def status(cache_dir: Path, dram_dir: Path, as_json: bool) -> None:
    """Show what is in the tiers of a cache directory.

    Live engines answer for themselves (tiers, hits, counters); of the rest the files
    are looked at: namespaces, chunks, bytes, quarantine, the cap and the real bytes
    used, DRAM tiers that wait for their engine, and namespaces that nobody uses. Changes nothing.

    \b
    Exit status:
      0  shown, also if an engine did not answer (it is shown as such)
      1  it could not be read (no such directory, no access)
      2  wrong usage
    """
    report = read_status(cache_dir, dram_dir=dram_dir)
    if as_json:
        print_json(report)
    else:
        _print_text(report)


def _print_text(report: StatusReport) -> None:
    click.echo(report.cache_dir)
    recorded = "" if report.is_cap_recorded else " (80 % of the file system; no engine recorded one)"
    used = f"{size_text(report.used_bytes)} of {size_text(report.cap_bytes)}{recorded}"
    print_facts((("used", used), ("engines", len(report.engines))), indent="  ")
    for engine in report.engines:
        click.echo(f"\nengine {engine.engine} (pid {engine.pid}), namespace {engine.namespace[:12]}")
        print_facts([("no answer", engine.error), *_flat(engine.answer or {})], indent="  ")
    for ns in report.namespaces:
        click.echo(f"\nnamespace {ns.directory}")
        print_facts(
            (
                ("model", ns.human.get("model")),
                ("chunks", f"{ns.num_chunks}, {ns.num_tokens} tokens"),
                ("dead chunks", ns.dead_chunks or None),
                ("shards", f"{ns.num_shards}, {size_text(ns.shard_bytes)}"),
                ("damaged", f"{ns.damaged_shards} shards" if ns.damaged_shards else None),
                ("quarantine", _quarantine(ns.quarantined_shards, ns.quarantined_bytes)),
                ("last use", time_text(ns.last_use)),
                ("unused", None if ns.is_used else "gives way when room is needed"),
            ),
            indent="  ",
        )
    for file in report.dram_files:
        click.echo(f"\nDRAM file {file.path}, {'in use' if file.is_used else 'at rest'}")
        _print_dram(file)
    for file in report.other_dram_files:
        click.echo(f"\nDRAM file {file.path}, of another cache directory, without an owner")
        _print_dram(file)


def _print_dram(file: DramFileStatus) -> None:
    facts = (("chunks", file.num_chunks), ("memory", size_text(file.nbytes)), ("last use", time_text(file.last_use)))
    print_facts(facts, indent="  ")


def _quarantine(count: int, nbytes: int) -> str | None:
    return f"{count} files, {size_text(nbytes)}" if count else None


def _flat(answer: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """An engine's own answer, nested names joined by dots."""
    lines: list[tuple[str, object]] = []
    for name, value in answer.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{name}.")
        else:
            lines.append((prefix + name, value))
    return lines
