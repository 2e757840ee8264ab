"""The files of adapters on this machine: fetched and checked before an engine reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvasir.config.spec.deployment import LoraLoadingSpec
from kvasir_workers.adapters.files import AdapterFiles, base_shapes, read_adapter
from kvasir_workers.adapters.sources import AdapterSources


def default_cache() -> Path:
    """Return the folder of downloads, unless the spec names one."""
    return Path.home() / ".cache" / "kvasir" / "adapters"


class AdapterStore:
    """Adapters for the model in the folder `base`. All work runs on threads."""

    def __init__(self, spec: LoraLoadingSpec, base: Path) -> None:
        self._spec = spec
        self._base = base
        self._shapes: dict[str, tuple[int, ...]] | None = None
        cache = default_cache() if spec.cache_folder is None else Path(spec.cache_folder).expanduser()
        self._sources = AdapterSources(
            spec.allow, max_bytes=spec.max_bytes, cache_folder=cache, timeout_s=spec.timeout_s
        )

    async def open(self, source: str) -> AdapterFiles:
        """Return the adapter at `source`, which may be downloaded. Raise RequestError."""
        return await asyncio.to_thread(self._open, source)

    async def discard(self, files: AdapterFiles) -> None:
        """Delete what was downloaded for an adapter."""
        await asyncio.to_thread(self._sources.discard, files.folder)

    async def close(self) -> None:
        """Delete all downloads. Idempotent."""
        await asyncio.to_thread(self._sources.close)

    def _open(self, source: str) -> AdapterFiles:
        folder = self._sources.fetch(source)
        try:
            if self._shapes is None:
                self._shapes = base_shapes(self._base)
            spec = self._spec
            return read_adapter(
                folder, source, max_rank=spec.max_rank, max_bytes=spec.max_bytes, base=self._shapes
            )
        except BaseException:
            self._sources.discard(folder)
            raise
