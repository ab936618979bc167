"""A connector for engine tests whose loads fail: loaded by vLLM through its module path."""

from __future__ import annotations

from typing import Any

from kvsnap_connector.connector import KVSnapConnector
from kvsnap_connector.wire import KVSnapMetadata


class FailingLoads(KVSnapConnector):
    """Promises as always, and then no load goes through."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Refuse the whole plan, stores apart."""
        meta = self._connector_metadata
        if isinstance(meta, KVSnapMetadata) and meta.plan is not None and self._worker is not None:
            stores, meta.plan.stores = meta.plan.stores, []
            self._worker.refuse(meta.plan)
            self._worker._stored_seq -= 1
            meta.plan.stores = stores
