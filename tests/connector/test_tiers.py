"""The tiers as an engine opens them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvsnap.config import Config
from kvsnap_connector.tiers import open_cache
from tests.disk_fakes import make_namespace


def test_a_fresh_cache_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    """KV caches can reveal prompts; a server may run with any umask."""
    cache_dir = tmp_path / "new" / "cache"
    config = Config.parse({"cache_dir": str(cache_dir), "dram": "4MiB", "dram_dir": str(tmp_path), "disk": "64MiB"})
    before = os.umask(0)
    try:
        cache = open_cache(make_namespace(), config, world_size=1, num_engines=1, max_prompt_tokens=1024)
    finally:
        os.umask(before)
    cache.close()

    assert cache.disk is not None
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700
