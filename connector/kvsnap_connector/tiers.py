"""Opens the tiers of one engine, as large as the machine allows."""

from __future__ import annotations

import logging

from kvsnap.cache import CacheOptions, TieredCache
from kvsnap.config import Config, available_memory, parse_size
from kvsnap.errors import ConfigError, KvsnapError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramTier
from kvsnap.tiers.quota import filesystem_bytes

log = logging.getLogger(__name__)

_SPARE_SLOTS = 4
"""Slots beside one longest prompt when nothing is to be kept in DRAM."""


def open_cache(
    namespace: Namespace, config: Config, *, world_size: int, num_engines: int, max_prompt_tokens: int
) -> TieredCache:
    """Attach or create both tiers. Threads are not started yet.

    An environment that gives less than asked for (a small `/dev/shm`, a disk that can't
    be written) means a smaller cache and a log line.

    Raises:
        ConfigError: `dram` is too small for a single chunk, or `disk` makes no sense.
        StorageError: not even a small DRAM tier can be had.
    """
    disk = _open_disk(namespace, config)
    try:
        dram = _open_dram(namespace, config, world_size, num_engines, max_prompt_tokens)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    for message in dram.messages:
        log.info("kvsnap: %s", message)
    options = CacheOptions(persist=config.persist, persist_salted=config.persist_salted, read_only=config.read_only)
    return TieredCache(namespace, dram, disk, options)


def dram_budget(config: Config, num_engines: int) -> int:
    """Bytes of DRAM that this engine may use: its share of what the server may."""
    return parse_size(config.dram, of=available_memory()) // num_engines


def _open_dram(
    namespace: Namespace, config: Config, world_size: int, num_engines: int, max_prompt_tokens: int
) -> DramTier:
    geometry = namespace.geometry
    budget = dram_budget(config, num_engines)
    chunk = geometry.chunk_bytes(namespace.chunk_tokens)
    keeps = budget > 0
    if keeps and budget < chunk:
        raise ConfigError(
            f"dram is {budget} bytes for each engine, but one chunk has {chunk}; raise dram or lower chunk_tokens"
        )
    if not keeps:
        slots = -(-max_prompt_tokens // namespace.chunk_tokens) + _SPARE_SLOTS
        budget = slots * (chunk + (1 << 16))
        log.info("kvsnap: dram is 0: a staging area of %d bytes, nothing is kept in DRAM", budget)
        return DramTier.anonymous(namespace.id(), geometry, budget_bytes=budget, ranks=world_size)
    try:
        return DramTier.open(
            config.dram_dir, config.cache_dir, namespace.id(), geometry, budget_bytes=budget, ranks=world_size
        )
    except (StorageError, OSError) as error:
        log.warning("kvsnap: %s; using memory that won't survive a restart", error)
        return DramTier.anonymous(namespace.id(), geometry, budget_bytes=budget, ranks=world_size)


def _open_disk(namespace: Namespace, config: Config) -> DiskTier | None:
    try:
        cap = parse_size(config.disk, of=filesystem_bytes(config.cache_dir))
        return DiskTier(config.cache_dir, namespace, cap_bytes=cap, read_only=config.read_only)
    except ConfigError:
        raise
    except (KvsnapError, OSError) as error:
        log.warning("kvsnap: the disk tier is off: %s", error)
        return None
