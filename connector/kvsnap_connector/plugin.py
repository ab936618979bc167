"""The `vllm.general_plugins` entry point: makes "KVSnapConnector" a known connector name."""

from __future__ import annotations

NAME = "KVSnapConnector"


def register() -> None:
    """Register the connector, once; vLLM runs its plugins in every process, some of them twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvsnap_connector.connector", NAME)
