"""The port of engines that load LoRA adapters while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class AdapterEngine(Protocol):
    """The part of an engine that loads adapters. An adapter is known by its key, which requests carry."""

    async def add_adapter(self, key: str, folder: Path) -> None:
        """Load the adapter in `folder`, which stays until the adapter is removed. Raises RequestError with
        the engine's reason if it does not accept the adapter."""
        ...

    async def remove_adapter(self, key: str) -> None:
        """Remove an adapter that no live leg uses. Unknown keys are ignored."""
        ...

    def adapter_legs(self, key: str) -> int:
        """Return the number of live legs that use the adapter."""
        ...
