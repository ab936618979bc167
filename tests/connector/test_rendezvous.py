"""Processes of one engine find each other, and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvsnap.errors import KvsnapError
from kvsnap_connector import rendezvous
from kvsnap_connector.rendezvous import Declined, RankGeometry

GEOMETRY = RankGeometry(
    rank=0,
    tp_rank=0,
    tp_size=2,
    pp_rank=0,
    pp_size=1,
    layers=("layers.0", "layers.1"),
    kv_heads=3,
    block_tokens=128,
    page_shape=(3, 128, 128),
    page_bytes=98304,
    dtype="BF16",
    page_format={"backend": "CPU_ATTN", "isa": "amx", "order": "HNC"},
    replicated=False,
    kv_scales=((0.5, 1.0), (0.25, 1.0)),
)


def test_geometry_comes_back_as_it_was(own_runtime_dir: Path) -> None:
    second = replace(GEOMETRY, rank=1, tp_rank=1, kv_scales=None)
    rendezvous.write_rank("engine", 0, GEOMETRY)
    rendezvous.write_rank("engine", 1, second)

    assert rendezvous.read_ranks("engine", 2) == [GEOMETRY, second]


def test_a_rank_that_left_nothing_is_on_another_host(own_runtime_dir: Path) -> None:
    rendezvous.write_rank("engine", 0, GEOMETRY)

    answer = rendezvous.read_ranks("engine", 2)

    assert isinstance(answer, Declined)
    assert answer.reason.startswith("rank 1 of 2 left no geometry on this host")


def test_a_rank_that_declines_gives_the_reason(own_runtime_dir: Path) -> None:
    rendezvous.write_rank("engine", 0, Declined(reason="unequal pages"))

    assert rendezvous.read_ranks("engine", 1) == Declined(reason="unequal pages")


def test_another_engine_sees_nothing(own_runtime_dir: Path) -> None:
    rendezvous.write_rank("engine", 0, GEOMETRY)

    assert isinstance(rendezvous.read_ranks("other", 1), Declined)


def test_an_engine_id_is_never_part_of_a_path(own_runtime_dir: Path) -> None:
    """D17: what an operator types must not name a file elsewhere."""
    rendezvous.write_tier("../../etc/x", {"path": "p"})

    assert rendezvous.read_tier("../../etc/x") == {"path": "p"}
    assert [path.parent for path in own_runtime_dir.rglob("*.json")] == [own_runtime_dir]


def test_files_of_dead_processes_do_not_count_and_are_removed(own_runtime_dir: Path) -> None:
    """Engine ids may be given by the operator, so a file of the last run can have the right name."""
    code = (
        "from kvsnap_connector import rendezvous\n"
        "rendezvous.write_tier('engine', {'path': 'p'})\n"
        "rendezvous.write_rank('engine', 0, rendezvous.Declined(reason='x'))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert len(list(own_runtime_dir.glob("*.json"))) == 2

    assert isinstance(rendezvous.read_tier("engine"), Declined)
    assert rendezvous.sweep() == 2
    assert list(own_runtime_dir.glob("*.json")) == []


def test_a_symlink_is_not_followed(own_runtime_dir: Path, tmp_path: Path) -> None:
    rendezvous.write_tier("engine", {"path": "p"})
    (path,) = own_runtime_dir.glob("*.json")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    assert isinstance(rendezvous.read_tier("engine"), Declined)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "start": 2}'])
def test_a_damaged_file_is_no_answer(own_runtime_dir: Path, content: str) -> None:
    rendezvous.write_tier("engine", {"path": "p"})
    (path,) = own_runtime_dir.glob("*.json")
    path.write_text(content)

    assert isinstance(rendezvous.read_tier("engine"), Declined)


def test_files_are_private(own_runtime_dir: Path) -> None:
    rendezvous.write_tier("engine", {"nonce": "secret"})

    (path,) = own_runtime_dir.glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_process_left_is_removed_at_the_end(own_runtime_dir: Path) -> None:
    rendezvous.write_tier("engine", {"path": "p"})
    rendezvous.write_tier("other", {"path": "p"})

    rendezvous.remove_own("engine")

    assert isinstance(rendezvous.read_tier("engine"), Declined)
    assert rendezvous.read_tier("other") == {"path": "p"}


def test_geometry_of_another_version_is_refused() -> None:
    content = json.loads(json.dumps(GEOMETRY.to_json()))
    content["colour"] = "red"

    with pytest.raises(KvsnapError, match="colour"):
        RankGeometry.from_json(content)
