"""The vLLM side of SARIA. `SariaConnector` is imported on first use, so that the plugin entry point stays cheap."""

from __future__ import annotations

from typing import Any

NAME = "SariaConnector"


def register() -> None:
    """Make the connector known to vLLM by name. vLLM calls this once in each of its processes, sometimes more."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "saria_connector.connector", NAME)


def __getattr__(name: str) -> Any:
    if name == NAME:
        register()  # MultiConnector looks classes up by name for its stats, even when the module path was used.
        from saria_connector.connector import SariaConnector

        return SariaConnector
    raise AttributeError(name)
