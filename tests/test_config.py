"""Configuration and sizes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.config import Config, available_memory, parse_size
from kvsnap.errors import ConfigError

GIB = 2**30


def test_defaults() -> None:
    config = Config.parse({})

    assert config == Config()
    assert config.cache_dir == Path("~/.cache/kvsnap").expanduser()
    assert (config.dram, config.dram_dir, config.disk) == ("25%", Path("/dev/shm"), "80%")
    assert (config.persist, config.persist_salted, config.read_only) == ("auto", False, False)
    assert (config.snapshot, config.snapshot_required) == (None, False)
    assert (config.preload, config.preload_bytes, config.preload_seconds) == ("blocking", None, 300)
    assert (config.load_policy, config.lookup_seconds, config.flush_seconds) == ("auto", 2, 10)
    assert (config.weights_digest, config.identity_tag) == ("auto", "")
    assert config.resolve_chunk_tokens(16) == 256


def test_every_key_is_taken() -> None:
    """As JSON gives them: strings, whole numbers, booleans."""
    values: dict[str, Any] = {
        "cache_dir": "/nvme/kvsnap",
        "chunk_tokens": 512,
        "dram": 0,
        "dram_dir": "/mnt/shm",
        "disk": "1.5TB",
        "persist": "hot",
        "persist_salted": True,
        "read_only": False,
        "snapshot": "s3://bucket/prefix@prod",
        "snapshot_required": True,
        "preload": "off",
        "preload_bytes": "10 GiB",
        "preload_seconds": 60,
        "load_policy": "always",
        "lookup_seconds": 0.5,
        "weights_digest": "llama-3.1-8b@2026-01",
        "identity_tag": "blue",
        "flush_seconds": 0,
    }

    config = Config.parse(values)

    assert set(values) == {field.name for field in fields(Config)}
    for name, value in values.items():
        found = getattr(config, name)
        assert (str(found) if isinstance(found, Path) else found) == value


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("chunk_token", "chunk_tokens"), ("cachedir", "cache_dir"), ("DRAM", "dram"), ("preload_secs", "preload_seconds")],
)
def test_unknown_key_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown configuration key '{name}'; did you mean {nearest}"):
        Config.parse({name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_dir", ""),
        ("cache_dir", 3),
        ("chunk_tokens", 0),
        ("chunk_tokens", "256"),
        ("chunk_tokens", True),
        ("chunk_tokens", None),
        ("dram", "lots"),
        ("dram", -1),
        ("dram", "200%"),
        ("dram", 0.25),
        ("dram", False),
        ("disk", None),
        ("persist", "always"),
        ("persist", True),
        ("persist_salted", "false"),
        ("read_only", 0),
        ("snapshot", "s3://bucket/prefix"),
        ("snapshot", "@prod"),
        ("snapshot", "/repo@"),
        ("preload", True),
        ("preload_seconds", -1),
        ("preload_seconds", float("nan")),
        ("lookup_seconds", "2"),
        ("flush_seconds", True),
        ("load_policy", "never"),
        ("weights_digest", ""),
        ("identity_tag", None),
    ],
)
def test_wrong_values_name_key_value_and_expectation(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse({name: value})

    message = str(caught.value)
    assert message.startswith(name)
    assert str(value) in message
    assert "expected" in message or "negative" in message


def test_read_only_excludes_a_snapshot() -> None:
    with pytest.raises(ConfigError, match="read_only and snapshot exclude each other"):
        Config.parse({"read_only": True, "snapshot": "/repo@prod"})


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")

    assert Config.parse({"cache_dir": "~/kv"}).cache_dir == Path("/home/ada/kv")
    assert Config().cache_dir == Path("/home/ada/.cache/kvsnap")


@pytest.mark.parametrize(("block", "chunk"), [(16, 256), (128, 256), (96, 288), (512, 512), (1, 256)])
def test_default_chunk_is_rounded_up_to_blocks(block: int, chunk: int) -> None:
    """Only an explicit value can be wrong: a default must never stop a start."""
    assert Config().resolve_chunk_tokens(block) == chunk


def test_given_chunk_must_be_whole_blocks() -> None:
    config = Config.parse({"chunk_tokens": 256})

    assert config.resolve_chunk_tokens(128) == 256
    with pytest.raises(ConfigError, match="chunk_tokens is 256, expected a multiple of the engine's block size 96"):
        config.resolve_chunk_tokens(96)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("7B", 7),
        ("20GiB", 20 * GIB),
        ("20gib", 20 * GIB),
        ("20Gi", 20 * GIB),
        ("20 GB", 20 * 10**9),
        ("1.5 MB", 1_500_000),
        ("512k", 512_000),
        (" 2TiB ", 2**41),
        ("1PiB", 2**50),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "size"), [("25%", 250), ("0%", 0), ("100%", 1000), ("12.5 %", 125), ("0.05%", 0)])
def test_percentages(text: str, size: int) -> None:
    assert parse_size(text, of=1000) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "20XB", "1,5GB", "0x10", "20GiBB", "٣", "1 000", "%", True, None]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size, expected bytes, or for example 20GiB or 25%"):
        parse_size(text, of=1000)


def test_percentage_needs_a_whole() -> None:
    with pytest.raises(ConfigError, match="is a percentage, expected bytes"):
        parse_size("25%")


@given(st.integers(0, 2**60))
def test_bytes_are_exact(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == size


def make_host(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A /proc and /sys with 64 GiB of memory."""
    files = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n", "proc/self/cgroup": cgroup, **limits}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "size"),
    [
        ("0::/\n", {}, 64 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}, 8 * GIB),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, 64 * GIB),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/not/visible\n", {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ("0::/../x\n", {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{3 * GIB}\n"},
            3 * GIB,
        ),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GIB),
    ],
)
def test_cgroup_limit_counts(tmp_path: Path, cgroup: str, limits: dict[str, str], size: int) -> None:
    """A quarter of the host's memory can be more than a container may use."""
    assert available_memory(make_host(tmp_path, cgroup, limits)) == size


def test_memory_of_this_process() -> None:
    assert 2**26 < available_memory() < 2**50
