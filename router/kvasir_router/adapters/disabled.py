"""The adapters of a model for which none can be loaded."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.core.adapters import HeldAdapter
from kvasir.core.messages import AdapterReport
from kvasir.ports.router import ServedAdapter
from kvasir_router.adapters.errors import disabled, not_loaded


class NoAdapters:
    """`kvasir.ports.router.AdapterPort` of a model for which none can be loaded."""

    def served(self) -> Mapping[str, ServedAdapter]:
        """None."""
        return {}

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """Raise RequestError (adapter_loading_disabled)."""
        raise disabled()

    async def unload(self, name: str) -> tuple[str, ...]:
        """Raise RequestError (adapter_not_found)."""
        raise not_loaded(name)

    def held(self, worker_id: str) -> tuple[HeldAdapter, ...]:
        """None."""
        return ()

    def heard(self, worker_id: str, report: AdapterReport) -> None:
        """Workers of such a model report none."""

    def joined(self, worker_id: str) -> None:
        """Nothing is missing there."""

    def left(self, worker_id: str) -> None:
        """Nothing was there."""
