"""A router's copy of one engine's cache, built as routers build it, to compare with the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing

from kvasir.core.errors import CapacityError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, Medium
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import token_ids
from kvasir.native import PrefixTree
from kvasir.native.salt_places import prompt_names
from kvasir.ports.engine import KvSource

_CAPACITY = 1 << 22
_PATIENCE_S = 60.0
_RETRY_S = 0.02


class KvFollower:
    """EXACT from `catch_up` until a gap or a new epoch, which set `exact` to False."""

    def __init__(self, identity: WorkerIdentity, source: KvSource) -> None:
        self._identity = identity
        self._source = source
        self._begin_anew()
        self._position = (0, 0)
        self._early: list[KvBatch] = []
        self._changed = asyncio.Event()
        self.exact = False
        source.subscribe(self._hear)

    async def catch_up(self) -> None:
        """Apply a snapshot and its suffix; wait while the record is incomplete. Raise TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            while not await self._snapshot():
                await asyncio.sleep(_RETRY_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds for what is reported. Raise TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def held(self, rank: int = 0) -> int:
        """Blocks on one rank's device."""
        return self._tree.held(self._groups[rank], Medium.DEVICE)

    def blocks(
        self,
        tokens: Sequence[int],
        rank: int = 0,
        salt: str = "",
        adapter: str | None = None,
        *,
        media: Sequence[PromptMedia] = (),
    ) -> int:
        """Number of leading blocks of `tokens` that a rank holds."""
        identity = self._identity
        depths = array("I", bytes(16 * len(self._groups)))
        size = identity.kv.block_size
        names = prompt_names(identity.model, salt, adapter or "", token_ids(tokens), size, media=media)
        self._tree.match(names, depths)
        return depths[len(Medium) * self._groups[rank]]

    def hit(
        self,
        tokens: Sequence[int],
        rank: int = 0,
        salt: str = "",
        adapter: str | None = None,
        *,
        media: Sequence[PromptMedia] = (),
    ) -> int:
        """Number of cached prompt tokens on a rank: whole blocks, never including the last token."""
        size = self._identity.kv.block_size
        return min(self.blocks(tokens, rank, salt, adapter, media=media), (len(tokens) - 1) // size) * size

    def _begin_anew(self) -> None:
        self._tree = PrefixTree(_CAPACITY, 0)
        self._groups = [self._tree.add_group() for _ in range(self._identity.data_parallel_size)]

    async def _snapshot(self) -> bool:
        self._begin_anew()
        self._early.clear()
        self.exact = False
        try:
            async with aclosing(self._source.snapshot()) as parts:
                async for part in parts:
                    self._position = (part.epoch, part.sequence)
                    self._tree.apply(self._groups, part.log)
        except CapacityError:
            return False
        self.exact = True
        early, self._early = self._early, []
        for batch in early:
            self._hear(batch)
        return self.exact

    def _hear(self, batch: KvBatch) -> None:
        self._changed.set()
        if not self.exact:
            self._early.append(batch)
            return
        epoch, sequence = self._position
        if batch.epoch == epoch and batch.sequence <= sequence:
            return
        if (batch.epoch, batch.sequence) != (epoch, sequence + 1):
            self.exact = False
            return
        self._position = (epoch, sequence + 1)
        self._tree.apply(self._groups, batch.log)
