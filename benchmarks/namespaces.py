"""Namespaces to measure with."""

from __future__ import annotations

from kvsnap.identity import ModelIdentity
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace


def small_pages() -> Namespace:
    """16-token blocks, 256-token chunks of 4 KiB: as many keys as on a GPU, few bytes."""
    return _namespace(block_tokens=16, page_shape=(1, 16, 8), layers=1)


def smollm2() -> Namespace:
    """SmolLM2-135M in bfloat16 on vLLM's CPU backend: 128-token blocks, chunks of 5.9 MB."""
    return _namespace(block_tokens=128, page_shape=(3, 128, 128), layers=30)


def llama_8b() -> Namespace:
    """Llama 3 8B in bfloat16: 16-token blocks, chunks of 32 MiB."""
    return _namespace(block_tokens=16, page_shape=(8, 2, 16, 128), layers=32)


def _namespace(*, block_tokens: int, page_shape: tuple[int, ...], layers: int) -> Namespace:
    return Namespace(
        identity=ModelIdentity(weights="dummy:0", config={}, dtype="bfloat16", kv_dtype="bfloat16"),
        layout=Layout(
            block_tokens=block_tokens,
            dtype="BF16",
            page_shape=page_shape,
            page_format={"backend": "benchmark"},
            slices=(SliceLayout(num_layers=layers, kv_heads=page_shape[0], ranks=(0,)),),
        ),
        chunk_tokens=256,
    )
