"""The adapters of several models behind one port."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.ports.router import ServedAdapter
from kvasir_router.adapters.control import AdapterControl
from kvasir_router.adapters.disabled import NoAdapters
from kvasir_router.adapters.errors import disabled, not_loaded, unknown_model


class ModelAdapters:
    """`kvasir.ports.router.AdapterPort` over those of `models`, by model name."""

    def __init__(self, models: Mapping[str, AdapterControl | NoAdapters]) -> None:
        self._models = dict(models)

    def served(self) -> Mapping[str, ServedAdapter]:
        """See AdapterCatalog."""
        found: dict[str, ServedAdapter] = {}
        for model in reversed(self._models.values()):
            found |= model.served()
        return found

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """See AdapterPort. Raises also RequestError (`model_not_found`)."""
        if model is None:
            loading = [each for each in self._models.values() if isinstance(each, AdapterControl)]
            if not loading:
                raise disabled()
            chosen: AdapterControl | NoAdapters = loading[0]
        elif model in self._models:
            chosen = self._models[model]
        else:
            raise unknown_model(model, self._models)
        for each in self._models.values():
            if isinstance(each, AdapterControl) and each is not chosen:
                each.check_unused(name)
        return await chosen.load(model, name, source, replicas)

    async def unload(self, name: str) -> tuple[str, ...]:
        """See AdapterPort."""
        for each in self._models.values():
            if isinstance(each, AdapterControl) and each.uses(name):
                return await each.unload(name)
        raise not_loaded(name)
