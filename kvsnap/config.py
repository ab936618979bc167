"""Configuration: the keys of `kv_connector_extra_config`, their defaults, and sizes.

What depends on the machine (percentages, the block size) is kept as given and resolved
where it is known: `parse_size`, `Config.resolve_chunk_tokens`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvsnap.errors import ConfigError

Size = int | str
"""Bytes, or a text that `parse_size` understands."""

DEFAULT_CHUNK_TOKENS = 256

_UNITS = {"": 1, **{f"{p}{i}": b ** (n + 1) for n, p in enumerate("kmgtp") for i, b in (("", 1000), ("i", 1024))}}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([kmgtp]i?|)b?)\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every key of `kv_connector_extra_config`, checked. Make it with `parse`."""

    cache_dir: Path = field(default_factory=lambda: Path("~/.cache/kvsnap").expanduser())
    """The disk tier."""
    chunk_tokens: int | None = None
    """Tokens in a chunk; None is the default, which `resolve_chunk_tokens` knows."""
    dram: Size = "25%"
    """DRAM budget: bytes or a share of the memory this server may use; 0 keeps nothing."""
    dram_dir: Path = Path("/dev/shm")
    """Where the DRAM tier's file lives."""
    disk: Size = "80%"
    """Disk cap in real bytes: bytes or a share of the file system."""
    persist: str = "auto"
    """When chunks are written to disk: `auto`, `hot`, `all`, `none`."""
    persist_salted: bool = False
    """Whether chunks of salted requests may reach the disk."""
    read_only: bool = False
    """Change nothing in the cache directory."""
    snapshot: str | None = None
    """`URL@ref`, imported at start."""
    snapshot_required: bool = False
    """Refuse to start when the snapshot can't be used."""
    preload: str = "blocking"
    """`blocking`, `background`, `off`."""
    preload_bytes: Size | None = None
    """Bound of the preload; None is the DRAM budget, a percentage is a share of it."""
    preload_seconds: float = 300.0
    """Bound of the preload."""
    load_policy: str = "auto"
    """`auto` (load only when predicted faster than prefill) or `always`."""
    lookup_seconds: float = 2.0
    """Longest wait for a promotion before the request is computed."""
    weights_digest: str = "auto"
    """`auto` (content), or a string that the operator declares."""
    identity_tag: str = ""
    """The operator's own part of the identity."""
    flush_seconds: float = 10.0
    """Bound of the flush at shutdown."""

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> Config:
        """Check `mapping`, key by key.

        Raises:
            ConfigError: an unknown key (the message names the nearest known one), a value
                of another type or out of range, or two values that exclude each other.
        """
        known = [known.name for known in fields(cls)]
        for name in mapping:
            if name not in known:
                near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.0)
                raise ConfigError(f"unknown configuration key {name!r}; did you mean {near[0]}?")
        config = cls(**{name: _PARSERS[name](name, value) for name, value in mapping.items()})
        if config.read_only and config.snapshot is not None:
            raise ConfigError("read_only and snapshot exclude each other: an import writes to cache_dir; drop one")
        return config

    def resolve_chunk_tokens(self, block_tokens: int) -> int:
        """The chunk size for this block size: the default is rounded up, a given one is taken as it is.

        Raises:
            ConfigError: the given one isn't a multiple of `block_tokens`.
        """
        if self.chunk_tokens is None:
            return -(-DEFAULT_CHUNK_TOKENS // block_tokens) * block_tokens
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                f"chunk_tokens is {self.chunk_tokens}, expected a multiple of the engine's block size {block_tokens}"
            )
        return self.chunk_tokens


def parse_size(text: str | int, *, of: int | None = None) -> int:
    """Bytes of "20GiB", "1.5 MB", "512k", a plain number, or "25%" of `of`; rounded down.

    Units: k, M, G, T, P are powers of 1000, Ki … Pi of 1024, both with or without a B, in any case.

    Raises:
        ConfigError: not a size, negative, above 100 %, or a percentage where none is taken (`of` is None).
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"size {text} is negative")
        return text
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(
            f"{text!r} is not a size, expected bytes, or for example 20GiB{'' if of is None else ' or 25%'}"
        )
    number, percent, unit = found.groups()
    if percent:
        if of is None:
            raise ConfigError(f"size {text} is a percentage, expected bytes, or for example 20GiB")
        if float(number) > 100:
            raise ConfigError(f"size {text} is more than all, expected at most 100%")
        return int(of * float(number) / 100)
    factor = _UNITS[unit.lower()]
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the tightest limit of its cgroups, else the host's memory.

    Knows cgroup v1 and v2. `root` is where /proc and /sys are (for tests).
    """
    text = (root / "proc/meminfo").read_text()
    total = int(re.findall(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE)[0]) * 1024
    return min([total, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> list[int]:
    """The limits of this process's memory cgroup and of all above it that are visible."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, which isn't visible; the top then is the container's own.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                text = top.joinpath(*parts[:depth], name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) > 0:
                limits.append(int(text))
    return limits


def _parse_path(name: str, value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "a path")
    return Path(value).expanduser().absolute()


def _parse_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _parse_weights_digest(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, '"auto" or a string that names the weights')
    return value


def _parse_snapshot(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not all(value.rpartition("@")):
        raise _wrong(name, value, "URL@ref")
    return value


def _parse_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _parse_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _wrong(name, value, "seconds, 0 or more")
    return float(value)


def _parse_chunk_tokens(name: str, value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "a number of tokens, 1 or more")
    return value


def _parse_size_of(name: str, value: object) -> Size:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _wrong(name, value, "bytes, or for example 20GiB or 25%")
    try:
        parse_size(value, of=0)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return value


def _parse_optional_size(name: str, value: object) -> Size | None:
    return None if value is None else _parse_size_of(name, value)


def _one_of(*choices: str) -> Any:
    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
        return value

    return parse


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r:.80}, expected {expected}")


_PARSERS: Mapping[str, Any] = {
    "cache_dir": _parse_path,
    "chunk_tokens": _parse_chunk_tokens,
    "dram": _parse_size_of,
    "dram_dir": _parse_path,
    "disk": _parse_size_of,
    "persist": _one_of("auto", "hot", "all", "none"),
    "persist_salted": _parse_bool,
    "read_only": _parse_bool,
    "snapshot": _parse_snapshot,
    "snapshot_required": _parse_bool,
    "preload": _one_of("blocking", "background", "off"),
    "preload_bytes": _parse_optional_size,
    "preload_seconds": _parse_seconds,
    "load_policy": _one_of("auto", "always"),
    "lookup_seconds": _parse_seconds,
    "weights_digest": _parse_weights_digest,
    "identity_tag": _parse_text,
    "flush_seconds": _parse_seconds,
}
