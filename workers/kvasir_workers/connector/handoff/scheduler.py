"""The hand-off half of the connector in the scheduler: which blocks are offered and pulled, and which
requests wait.

A decode request with a prompt of n tokens needs the KV of the first n - 1; the last token is computed locally
in any case, since its logits start the decode. So a pull covers the blocks of the first n - 1 tokens,
including a partly filled last block, except those in the local prefix cache. That computes one token per
request and moves no block that is not read.

A prompt that takes several steps is offered with the first of them, and its blocks are announced as they
become full. Blocks computed in one step are announced before the next step's forward pass. A request that
loses its blocks in between, by preemption or abort, loses the lease before its blocks are overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from kvasir_workers.connector import stats
from kvasir_workers.connector.orders import (
    ExtendOrder,
    OfferOrder,
    OfferParams,
    PullOrder,
    PullParams,
    Received,
    StepOrders,
    StepReport,
)
from kvasir_workers.connector.request_blocks import RequestProgress, absent_blocks
from kvasir_workers.transfer.common.lease_keys import issue
from kvasir_workers.transfer.common.ticket import Ticket, encode

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pulling:
    """A pull that a request waits for, until the request ends. `received` is summed over ranks."""

    blocks: int
    tokens: int
    received: Received | None = None

    def account(self) -> dict[str, int | float | str]:
        """Return the pull's fields for the request's output."""
        received = self.received or Received(0, 0.0, "closed")
        arrived = not received.failure
        return {
            "transferred_tokens": self.tokens if arrived else 0,
            "transferred_blocks": self.blocks if arrived else 0,
            "transferred_bytes": received.bytes_moved,
            "transfer_s": received.seconds,
            "failed_tokens": 0 if arrived else self.tokens,
            "failure": received.failure,
        }


@dataclass(slots=True)
class _Prefilling:
    """A running PREFILL request. `named` of its blocks were announced to receivers, None before it is
    offered. `preempted`: it is offered only at its end."""

    lease: OfferParams
    tokens: int
    named: int | None = None
    preempted: bool = False


Params = TypeVar("Params", OfferParams, PullParams)


class HandoffRequest(Protocol):
    """The part of vLLM's Request that this module reads."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None


class HandoffScheduler:
    """State of offers and pulls by request. `block_size` is in tokens; `overlap` offers prompts before they
    are computed."""

    def __init__(self, block_size: int, max_lease_s: float, *, overlap: bool) -> None:
        self._block_size = block_size
        self._max_lease_s = max_lease_s
        self._overlap = overlap
        self._endpoints: tuple[str, ...] = ()
        self._stages = 1
        self._prefilling: dict[str, _Prefilling] = {}
        self._releases: list[str] = []
        self._offers: list[OfferOrder | ExtendOrder] = []
        self._early: dict[str, dict[str, Any]] = {}
        self._pulls: list[PullOrder] = []
        self._leased: dict[str, int] = {}
        self._pulling: dict[str, _Pulling] = {}
        self._taken: set[str] = set()
        self._confirming: dict[str, int] = {}
        self._counts = dict.fromkeys(stats.COUNTERS, 0)
        self._reported_leased = 0

    def set_endpoints(self, endpoints: Sequence[str], stages: int = 1) -> None:
        """Set one agent endpoint per tensor-parallel rank, in rank order, of each of `stages` pipeline
        stages."""
        self._endpoints = tuple(endpoints)
        self._stages = stages

    def arrived(self, request: HandoffRequest) -> None:
        """Handle a request that was queued."""
        lease = self._lease(request) if self._overlap and self._endpoints else None
        if lease is not None:
            self._prefilling[request.request_id] = _Prefilling(lease, request.num_prompt_tokens)

    def matched_tokens(self, request: HandoffRequest, local_tokens: int) -> int:
        """Return how many tokens to pull beyond the `local_tokens` in the prefix cache."""
        if self._untaken_pull(request) is None:
            return 0
        return max(0, request.num_prompt_tokens - 1 - local_tokens)

    def allocated(self, request: HandoffRequest, block_ids: Sequence[int], load_tokens: int) -> None:
        """Order the pull, once per request. `block_ids` are all of the request's blocks."""
        handoff = self._untaken_pull(request)
        if handoff is None:
            return
        self._taken.add(request.request_id)
        if load_tokens == 0:
            self._confirm(request.request_id, handoff)
            return
        end = _blocks(request.num_prompt_tokens - 1, self._block_size)
        first = (request.num_prompt_tokens - 1 - load_tokens) // self._block_size
        first += absent_blocks(block_ids[first:end])
        targets = tuple(block_ids[first:end])
        self._pulling[request.request_id] = _Pulling(len(targets), load_tokens)
        self._pulls.append(PullOrder(request.request_id, handoff, first, targets, parked=True))

    def take_orders(
        self, progress: Iterable[RequestProgress], preempted: Iterable[str], *, idle: bool
    ) -> StepOrders:
        """Return the worker half's orders for this step. `progress` is what the step computes; `preempted`
        requests lost their blocks."""
        for request_id in preempted:
            self._withdraw(request_id)
        for each in progress if self._prefilling else ():
            self._name_blocks(each)
        orders = StepOrders(tuple(self._releases), tuple(self._offers), tuple(self._pulls), idle)
        self._releases, self._offers, self._pulls = [], [], []
        return orders

    def finished(
        self, request: HandoffRequest, block_ids: Sequence[int], completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks stay pinned, and the fields of the request's output."""
        never_pulled = self._untaken_pull(request)
        self._taken.discard(request.request_id)
        if never_pulled is not None:
            self._confirm(request.request_id, never_pulled)
            return False, None
        pulling = self._pulling.pop(request.request_id, None)
        if pulling is not None:
            return False, pulling.account() if pulling.received is not None else None
        lease = self._lease(request)
        self._early.pop(request.request_id, None)
        if lease is None or not completed or not self._endpoints:
            self._withdraw(request.request_id)
            self._prefilling.pop(request.request_id, None)
            return False, None
        blocks = tuple(block_ids[: _blocks(request.num_prompt_tokens, self._block_size)])
        prefilling = self._prefilling.pop(request.request_id, None)
        if prefilling is None or prefilling.named is None:
            self._offers.append(OfferOrder(request.request_id, lease, blocks, len(blocks), final=True))
        else:
            rest = blocks[prefilling.named :]
            self._offers.append(ExtendOrder(request.request_id, lease.lease_id, rest, final=True))
        self._leased[request.request_id] = len(block_ids) - absent_blocks(block_ids)
        return True, self._handoff(lease, blocks, len(blocks))

    def update(self, report: StepReport | None, sent: Iterable[str], received: Iterable[str]) -> None:
        """Process the worker half's report: requests whose leases ended, and requests whose pulls ended."""
        for request_id in sent:
            self._leased.pop(request_id, None)
        if report is not None:
            for request_id, part in report.received.items():
                self._add_received(request_id, part)
            for pull_id, ranks in report.confirmed.items():
                self._add_confirmed(pull_id, ranks)
            self._counts[stats.PEERS_REFUSED] += report.refused
        for request_id in received:
            if request_id not in self._pulling:
                continue
            total = self._pulling[request_id].received
            if total is None or total.failure:
                self._counts[stats.TRANSFERS_FAILED] += 1
            else:
                self._counts[stats.TRANSFERS_RECEIVED] += 1
                self._counts[stats.BYTES_RECEIVED] += total.bytes_moved

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping without a request."""
        return bool(self._confirming or self._pulls or self._offers or self._releases)

    def take_stats(self) -> dict[str, Any] | None:
        """Return increments, levels and early hand-offs since the last call; None if nothing changed."""
        leased = sum(self._leased.values())
        if leased == self._reported_leased and not any(self._counts.values()) and not self._early:
            return None
        report: dict[str, Any] = {**self._counts, stats.BLOCKS_LEASED: leased}
        if self._early:
            report[stats.EARLY_HANDOFFS], self._early = self._early, {}
        self._counts = dict.fromkeys(stats.COUNTERS, 0)
        self._reported_leased = leased
        return report

    def _name_blocks(self, progress: RequestProgress) -> None:
        """Offer a prompt that this step does not finish, or announce what earlier steps computed."""
        request_id = progress.request_id
        prefilling = self._prefilling.get(request_id)
        if prefilling is None or prefilling.preempted:
            return
        full = min(progress.before, prefilling.tokens) // self._block_size
        if prefilling.named is None:
            if progress.after >= prefilling.tokens:
                return
            lease, total = prefilling.lease, _blocks(prefilling.tokens, self._block_size)
            blocks = tuple(progress.block_ids()[:full])
            self._offers.append(OfferOrder(request_id, lease, blocks, total, final=False))
            # The ticket has no blocks: it may be read before this step's forward pass has ended.
            self._early[request_id] = self._handoff(lease, (), total)
        elif full > prefilling.named:
            blocks = tuple(progress.block_ids()[prefilling.named : full])
            self._offers.append(ExtendOrder(request_id, prefilling.lease.lease_id, blocks, final=False))
        prefilling.named = full

    def _withdraw(self, request_id: str) -> None:
        """End the lease of a request that loses its blocks. The request is not offered early again: a
        receiver may still hold the first ticket, and could not tell it from a second one."""
        prefilling = self._prefilling.get(request_id)
        if prefilling is None:
            return
        self._early.pop(request_id, None)
        prefilling.preempted = True
        if prefilling.named is not None:
            prefilling.named = None
            self._releases.append(prefilling.lease.lease_id)

    def _lease(self, request: HandoffRequest) -> OfferParams | None:
        lease = _params(request, "offer", OfferParams)
        if lease is None:
            return None
        return OfferParams(lease.lease_id, lease.fence, min(lease.ttl_s, self._max_lease_s))

    def _handoff(self, lease: OfferParams, blocks: tuple[int, ...], total: int) -> dict[str, Any]:
        ranks = tuple(issue(endpoint, lease.lease_id, lease.fence) for endpoint in self._endpoints)
        return {
            "lease_id": lease.lease_id,
            "fence": lease.fence,
            "ttl_s": lease.ttl_s,
            "blocks": total,
            "ticket": encode(Ticket(ranks, blocks, total, self._stages)),
        }

    def _untaken_pull(self, request: HandoffRequest) -> PullParams | None:
        """Return the hand-off, until it is ordered: a request that is recomputed must not pull again."""
        if request.request_id in self._taken:
            return None
        return _params(request, "pull", PullParams)

    def _confirm(self, request_id: str, handoff: PullParams) -> None:
        """Confirm a lease without a pull, so that the sender frees its blocks."""
        pull_id = f"{request_id}/confirm"
        self._confirming[pull_id] = 0
        self._pulls.append(PullOrder(pull_id, handoff, 0, (), parked=False))

    def _add_received(self, request_id: str, part: Received) -> None:
        pulling = self._pulling.get(request_id)
        if pulling is not None:
            pulling.received = part if pulling.received is None else pulling.received.plus(part)

    def _add_confirmed(self, pull_id: str, ranks: int) -> None:
        if pull_id in self._confirming:
            self._confirming[pull_id] += ranks
            if self._confirming[pull_id] >= max(1, len(self._endpoints)):
                del self._confirming[pull_id]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _params(request: HandoffRequest, key: str, form: type[Params]) -> Params | None:
    value = (request.kv_transfer_params or {}).get(key)
    if value is None:
        return None
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        # An exception here would end the engine; the request is computed without a transfer instead.
        _log.error("request %s: kv_transfer_params[%r] is malformed: %s", request.request_id, key, error)
        return None
