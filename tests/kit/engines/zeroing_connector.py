"""The control of the equality tests: a connector that moves the KV and then zeroes the received blocks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvasir_workers.connector import connector


class KvasirConnector(connector.KvasirConnector):
    """Loaded by vLLM in place of the product's connector, by a test that names this module."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the tensors."""
        self._tensors = kv_caches
        self._targets: dict[str, list[int]] = {}
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Zero the blocks of every completed pull."""
        for order in self._orders().pulls:
            self._targets[order.pull_id] = list(order.targets)
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            for tensor in self._tensors.values():
                tensor[self._targets[request_id]] = 0
        return results
