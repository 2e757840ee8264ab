"""The worker extension of an engine with a KV connector.

Separate from `worker_extension`, so that an aggregated engine does not import a transfer library.
"""

from __future__ import annotations

from kvasir_workers.connector.worker_extension import TransferExtension
from kvasir_workers.engines.vllm.runtime.worker_extension import EngineExtension


class TransferEngineExtension(EngineExtension, TransferExtension):
    """Combines both sets of methods, because vLLM accepts one extension class."""
