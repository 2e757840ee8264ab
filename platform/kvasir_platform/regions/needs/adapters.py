"""The adapters that were loaded in any cell: a name that another cell serves is known here as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvasir.ports.router import AdapterPort, ServedAdapter
from kvasir_platform.regions.needs.features import loaded_adapters
from kvasir_router.regions.reports import CellReport


class CellAdapters:
    """`AdapterPort` of a cell with peers, over its `own`. Loads and unloads are its own alone; of several
    adapters with one name, its own is served. Call `heard` about once a second."""

    def __init__(self, own: AdapterPort) -> None:
        self._own = own
        self._others: dict[str, ServedAdapter] = {}

    def served(self) -> Mapping[str, ServedAdapter]:
        """See AdapterCatalog."""
        own = self._own.served()
        return {**self._others, **own} if self._others else own

    def heard(self, reports: Iterable[CellReport]) -> None:
        """Take what the cells that can be reached serve, the one to prefer first."""
        found: dict[str, ServedAdapter] = {}
        for report in reports:
            for each in report.models:
                for adapter in loaded_adapters(each):
                    found.setdefault(adapter.name, adapter)
        self._others = found

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """See AdapterPort."""
        return await self._own.load(model, name, source, replicas)

    async def unload(self, name: str) -> tuple[str, ...]:
        """See AdapterPort."""
        return await self._own.unload(name)
