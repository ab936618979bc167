"""kvsnap's vLLM connector.

Importing this package imports no vLLM: `KVSnapConnector` is resolved on first use, as
vLLM does for `"kv_connector_module_path": "kvsnap_connector"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsnap_connector.connector import KVSnapConnector

__all__ = ["KVSnapConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVSnapConnector":
        from kvsnap_connector.connector import KVSnapConnector

        return KVSnapConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
