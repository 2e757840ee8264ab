"""The tier half of the connector in the scheduler: which blocks are stored below the device, and which are
loaded.

A block is copied into the arena after the step that fills it, unless it came from there or from another
worker. A waiting request is promised the blocks that are in the arena; while lower tiers are being queried,
vLLM is told to ask again, for as long as it would take to compute the blocks. The last token of a request is
computed in any case, since its logits are needed, so at most the blocks before it are loaded.

The blocks of a preempted request that are not in the arena are saved before they are overwritten, and stay
there until the request is scheduled again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.config.spec.tiers import TiersSpec
from kvasir.core.media.prompts import media_key
from kvasir.native import chain_hashes
from kvasir.native.media_marks import mark_item
from kvasir.native.salt_places import mark_place, prompt_root, salt_place
from kvasir.ports.tier import TierBlock
from kvasir_workers.connector import stats
from kvasir_workers.connector.request_blocks import RequestProgress, absent_blocks
from kvasir_workers.connector.tiers.orders import ArenaParts, LoadOrder, StoreOrder, TierOrders, TierReport
from kvasir_workers.connector.tiers.pace import PrefillPace
from kvasir_workers.connector.tiers.tracked import NOTHING, TierRequest, TrackedRequest
from kvasir_workers.tiers.store import TierStore

NAP_S = 0.002
LOGS_AT_ONCE = 16
REPORT_S = 0.1


@dataclass(slots=True)
class _Batch:
    """A store that ranks are executing. `below`: its blocks are also stored in lower tiers."""

    slots: list[int]
    below: bool
    ranks: int = 0


class TierScheduler:
    """State of stores and loads by request. `block_size` is in tokens, `window` the number of tokens whose
    blocks the engine keeps, None for all.

    `on_device(key)` returns whether the device's prefix cache has a block.
    """

    def __init__(
        self,
        store: TierStore,
        arena: ArenaParts,
        spec: TiersSpec,
        *,
        model: str,
        block_size: int,
        window: int | None = None,
        on_device: Callable[[bytes], bool],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._arena: ArenaParts | None = arena
        self._spec = spec
        self._model = model
        self._block_size = block_size
        self._ranks = len(arena.offsets)
        self._window = window
        self._on_device = on_device
        self._now = now
        self._tracked: dict[str, TrackedRequest] = {}
        self._early: list[StoreOrder] = []
        self._loads: list[LoadOrder] = []
        self._batches: dict[int, _Batch] = {}
        self._batch = 0
        self._pace = PrefillPace()
        self._counts = dict.fromkeys(stats.TIER_COUNTERS, 0)
        self._reported: tuple[Any, ...] = ()
        self._reported_at = now()
        self._idle = False

    # -- requests ----------------------------------------------------------------------------------

    def arrived(self, request: TierRequest) -> None:
        """Handle a queued request: fetch what the router expects in tiers while the request waits."""
        params = request.kv_transfer_params or {}
        if params.get("tiers") is False:
            return
        tracked = self._tracked[request.request_id] = TrackedRequest(request, array("Q"))
        if self._spec.prefetch and params.get("tier_tokens") and "pull" not in params:
            there = next(
                (at for at, key in enumerate(request.block_hashes) if not self._on_device(key)), None
            )
            if there is not None and there < self._last_block(tracked):
                self._fetch(tracked, there, self._last_block(tracked))

    def matched_tokens(self, request: TierRequest, local_tokens: int) -> int | None:
        """Return how many tokens to load beyond the `local_tokens` on the device; None while tiers are
        queried."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0
        self._note_preemption(tracked)
        local, last = local_tokens // self._block_size, self._last_block(tracked)
        tracked.promised = NOTHING
        if last <= local:
            return 0
        if tracked.fetch_from is None or tracked.fetch_from > local:
            self._fetch(tracked, local, last)
        ready = self._store.ready(request.request_id)
        if ready is None:
            tracked.since = self._now() if tracked.since is None else tracked.since
            if self._now() - tracked.since <= self._pace.seconds((last - local) * self._block_size):
                return None
            ready = self._store.stop(request.request_id)
        self._count_wait(tracked)
        tracked.promised = range(local, min((tracked.fetch_from or 0) + ready, last))
        return len(tracked.promised) * self._block_size

    def allocated(self, request: TierRequest, block_ids: Sequence[int], load_tokens: int) -> bool:
        """Order the load of what was promised, or release what was fetched. Return whether a load was
        ordered. `block_ids` are all of the request's blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        promised, tracked.promised = tracked.promised, NOTHING
        if not load_tokens or not promised:
            self._end_fetch(tracked)
            self._returned(tracked, stats.RECOMPUTED)
            return False
        slots = self._store.slots(
            request.request_id, promised.start - (tracked.fetch_from or 0), len(promised)
        )
        blocks = tuple(block_ids[promised.start : promised.stop])
        absent = absent_blocks(blocks)
        self._loads.append(LoadOrder(request.request_id, tuple(slots[absent:]), blocks[absent:]))
        tracked.loading = len(promised)
        tracked.since = self._now()
        self._returned(tracked, stats.SWAPPED_IN)
        return True

    def finished(self, request: TierRequest) -> dict[str, int | float] | None:
        """End a request and return its output's fields. A running load of it continues."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None
        self._note_prefill(tracked)
        if tracked.loading:
            tracked.ended = True
        else:
            self._forget(tracked)
        if not tracked.tier_tokens and not tracked.tier_s:
            return None
        return {"tier_tokens": tracked.tier_tokens, "tier_s": tracked.tier_s}

    # -- a step ------------------------------------------------------------------------------------

    def take_orders(
        self, progress: Iterable[RequestProgress], preempted: Iterable[str], *, idle: bool
    ) -> TierOrders | None:
        """Return the worker half's orders for this step; None if there are none. An idle step sleeps here
        while a request waits for a tier."""
        self._idle = idle
        if idle and self._store.fetching:
            self._store.nap(NAP_S)
        for request_id in preempted:
            if request_id in self._tracked:
                self._note_preemption(self._tracked[request_id])
        late = [order for each in progress for order in self._filled(each)]
        if self._arena is None and not self._early and not late and not self._loads:
            return None
        orders = TierOrders(self._arena, tuple(self._early), tuple(late), tuple(self._loads))
        self._arena, self._early, self._loads = None, [], []
        return orders

    def update(self, report: TierReport, received: Iterable[str]) -> set[str]:
        """Process the worker half's report. Return which of the `received` requests were tier loads."""
        for batch_id, ranks in report.stored.items():
            batch = self._batches[batch_id]
            batch.ranks += ranks
            if batch.ranks == self._ranks:
                del self._batches[batch_id]
                self._store.committed(batch.slots, below=batch.below)
        ours = {request_id for request_id in received if self._is_loading(request_id)}
        for request_id in ours:
            self._loaded(self._tracked[request_id], report.loaded.get(request_id, 0.0))
        return ours

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping without a request."""
        return bool(self._early or self._batches or self._loads) or self._store.unsettled

    def take_logs(self) -> list[bytes]:
        """Return the changes of tiers, as logs of bounded size."""
        return self._store.take_logs(LOGS_AT_ONCE)

    def announce(self) -> None:
        """Announce the complete contents of tiers."""
        self._store.announce()

    def take_stats(self) -> dict[str, Any] | None:
        """Return increments and levels since the last call; None if nothing changed, or if the last call was
        too recent."""
        counted = any(self._counts.values())
        if not counted and not self._idle and self._now() - self._reported_at < REPORT_S:
            return None
        self._reported_at = self._now()
        loads = self._store.loads()
        if not counted and loads == self._reported:
            return None
        self._reported = loads
        report = {**self._counts, stats.TIERS: [stats.tier_as_dict(load) for load in loads]}
        self._counts = dict.fromkeys(stats.TIER_COUNTERS, 0)
        return report

    def close(self) -> None:
        """Close the tiers."""
        self._store.close()

    # -- inside ------------------------------------------------------------------------------------

    def _last_block(self, tracked: TrackedRequest) -> int:
        """Return the end of the blocks that may be loaded."""
        request = tracked.request
        return min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))

    def _fetch(self, tracked: TrackedRequest, first: int, last: int) -> None:
        tracked.fetch_from = first
        self._store.begin(tracked.request.request_id, self._named(tracked, first, last))

    def _named(self, tracked: TrackedRequest, first: int, last: int) -> list[TierBlock]:
        """Return blocks `first`, …, `last - 1` of a request, with the engine's keys and the routers' block
        hashes."""
        request, size, names = tracked.request, self._block_size, tracked.names
        adapter = request.lora_request.lora_name if request.lora_request else ""
        salt = request.cache_salt or ""
        root = prompt_root(self._model, salt, adapter)
        if len(names) < last:
            tokens = array("I", request.all_token_ids[len(names) * size : last * size])
            if (place := salt_place(salt)) is not None:
                mark_place(tokens, len(names), place, size)
            for item in request.mm_features:
                at = item.mm_position
                key = media_key(item.identifier)
                mark_item(tokens, at.offset - len(names) * size, at.length, key, size)
            names.extend(chain_hashes(tokens, size, names[-1] if names else root))
        return [
            TierBlock(bytes(request.block_hashes[at]), names[at], names[at - 1] if at else root)
            for at in range(first, last)
        ]

    def _filled(self, progress: RequestProgress) -> list[StoreOrder]:
        """Return the stores of blocks that are full after this step."""
        tracked = self._tracked.get(progress.request_id)
        if tracked is None:
            return []
        request, size = tracked.request, self._block_size
        if tracked.given is None:
            tracked.given = progress.before // size
            self._store.touch(request.block_hashes[: tracked.given])
            if request.num_tokens == request.num_prompt_tokens:
                tracked.prefill = request.num_tokens - progress.before, self._now()
        self._note_prefill(tracked)
        # With speculation and asynchronous scheduling a step covers more than the known tokens.
        full = min(progress.after // size, len(request.block_hashes))
        seen = len(tracked.blocks)
        if full <= seen:
            return []
        tracked.blocks.extend(progress.block_ids()[seen:full])
        if self._spec.write_back == "prompts":
            full = min(full, request.num_prompt_tokens // size)
        order = self._save(tracked, max(seen, tracked.given), full, below=True)
        return [] if order is None else [order]

    def _save(self, tracked: TrackedRequest, first: int, last: int, *, below: bool) -> StoreOrder | None:
        """Copy those of blocks `first`, …, `last - 1` into the arena that it lacks."""
        if first >= last:
            return None
        slots = self._store.reserve(self._named(tracked, first, last))
        pairs = [
            (block, slot)
            for block, slot in zip(tracked.blocks[first:last], slots, strict=True)
            if slot is not None
        ]
        if not pairs:
            return None
        self._batch += 1
        self._batches[self._batch] = _Batch([slot for _, slot in pairs], below)
        return StoreOrder(self._batch, tuple(block for block, _ in pairs), tuple(slot for _, slot in pairs))

    def _note_preemption(self, tracked: TrackedRequest) -> None:
        """Save a preempted request's blocks, and keep them in the arena."""
        if tracked.request.num_preemptions == tracked.preemptions:
            return
        tracked.preemptions = tracked.request.num_preemptions
        tracked.returning = True
        held = len(tracked.blocks)
        order = self._save(tracked, self._first_kept(tracked), held, below=False)
        if order is not None:
            self._early.append(order)
        tracked.blocks.clear()
        tracked.given = None
        if held:
            self._fetch(tracked, 0, held)

    def _first_kept(self, tracked: TrackedRequest) -> int:
        """Return the first of a request's blocks that the engine has certainly not freed. It frees what a
        sliding window has left behind, and may be two blocks ahead of those seen here."""
        absent = absent_blocks(tracked.blocks)
        if self._window is None:
            return absent
        return max(absent, len(tracked.blocks) + 2 - -(-(self._window - 1) // self._block_size))

    def _note_prefill(self, tracked: TrackedRequest) -> None:
        """Measure the engine by a request that has got its first token."""
        if tracked.prefill is not None and tracked.request.num_tokens > tracked.request.num_prompt_tokens:
            tokens, since = tracked.prefill
            self._pace.computed(tokens, self._now() - since)
            tracked.prefill = None

    def _returned(self, tracked: TrackedRequest, how: str) -> None:
        if tracked.returning:
            tracked.returning = False
            self._counts[how] += 1

    def _is_loading(self, request_id: str) -> bool:
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.loading > 0

    def _loaded(self, tracked: TrackedRequest, seconds: float) -> None:
        self._store.loaded(tracked.loading, seconds)
        self._count_wait(tracked)
        if not tracked.preemptions:
            tracked.tier_tokens = tracked.loading * self._block_size
        tracked.loading = 0
        if tracked.ended:
            self._forget(tracked)
        else:
            self._end_fetch(tracked)

    def _count_wait(self, tracked: TrackedRequest) -> None:
        """Count the time that a request waited for tiers before its first token."""
        if tracked.since is not None and not tracked.preemptions:
            tracked.tier_s += self._now() - tracked.since
        tracked.since = None

    def _end_fetch(self, tracked: TrackedRequest) -> None:
        self._store.end(tracked.request.request_id)
        tracked.fetch_from = None

    def _forget(self, tracked: TrackedRequest) -> None:
        self._end_fetch(tracked)
        del self._tracked[tracked.request.request_id]
