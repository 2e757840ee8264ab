"""A method on vLLM's workers that ends a lease from outside the engine's step loop.

Named in `worker_extension_cls`; the engine adapter calls it by `collective_rpc`.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvasir_workers.connector.connector import KvasirConnector


class TransferExtension:
    """Mixin of vLLM's Worker class."""

    def kvasir_release_leases(self, lease_ids: list[str]) -> None:
        """Release the KV that was offered under these leases; unknown ids are ignored."""
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            if isinstance(connector, KvasirConnector):
                connector.release_leases(lease_ids)
