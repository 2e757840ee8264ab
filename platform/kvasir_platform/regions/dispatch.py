"""Where requests of this cell run: at home or in another cell, and where they go on when that fails.

A request goes to the cell that `kvasir_router.regions.choice` chooses. It is tried in each cell once, until
one takes it; after its first token it stays, unless its cell is lost or stops. One with media or an adapter
goes to cells that have what it takes. What needs something that only this cell has, or what is large to send,
runs at home always: a worker that the client named, log probabilities of prompts, and media of many bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.requests import Request
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary, RouterPort, StreamSink
from kvasir_platform.regions.needs.features import Features
from kvasir_platform.regions.needs.media import MAX_REQUEST_BYTES, media_bytes
from kvasir_platform.regions.peer import PeerCell
from kvasir_platform.regions.reporting import OwnReports
from kvasir_platform.regions.residency import Residency
from kvasir_platform.regions.streams import OWN_LOAD, CellStream
from kvasir_router.regions.choice import (
    CellChoice,
    CellOffer,
    CellReason,
    CellRequest,
    ChoiceRules,
    choose,
    offers_of,
)
from kvasir_router.regions.reports import CellReport
from kvasir_router.regions.view import CellState, RegionView

log = logging.getLogger(__name__)

_NEAREST_S = 1e-6
"""No other cell is as near as this one."""
MOST_LEAVING = 256
"""Requests that leave this cell in one turn of the loop."""
MAX_MOVES = 3
"""Cells that a request may lose before it ends with an error."""


class CellDispatch:
    """Sends requests to cells; `StreamRouter` of their streams. `tokenizers` has the digest of each model's
    tokenizer here: a cell with another one does not understand this cell's tokens."""

    def __init__(
        self,
        home: str,
        router: RouterPort,
        peers: Mapping[str, PeerCell],
        *,
        view: RegionView,
        own: OwnReports,
        clock: Clock,
        residency: Residency,
        rules: ChoiceRules,
        tokenizers: Mapping[str, str],
        features: Features,
        default_output: int,
    ) -> None:
        self.home = home
        self.counts: Counter[tuple[str, str]] = Counter()
        """Requests by cell and reason, those that moved once for each cell."""
        self.losses: Counter[str] = Counter()
        """Requests that lost their cell, by cell."""
        self._router = router
        self._peers = dict(peers)
        self._view = view
        self._own = own
        self._clock = clock
        self._residency = residency
        self._rules = rules
        self._tokenizers = tokenizers
        self._features = features
        self._default_output = default_output
        self._live: dict[str, CellStream] = {}

    @property
    def away(self) -> int:
        """Requests that run in other cells."""
        return sum(peer.in_flight for peer in self._peers.values())

    def own_report(self) -> CellReport:
        """Return what this cell says of itself."""
        return self._own.latest()

    def submit(self, request: Request, sink: StreamSink) -> None:
        """See RequestPort. Raise also RequestError 403 (`data_residency`) for a tenant that stays in other
        cells."""
        if request.request_id in self._live:
            raise RequestError(
                f"request {request.request_id} is in flight already", status=500, code="duplicate_request"
            )
        self._residency.check(request.tenant, self.home)
        stream = CellStream(request, sink, self)
        self._live[request.request_id] = stream
        try:
            self._start(stream)
        except BaseException:
            del self._live[request.request_id]
            raise

    def cancel(self, request_id: str) -> None:
        """See RequestPort."""
        stream = self._live.pop(request_id, None)
        if stream is not None:
            self._cancel_at(stream)

    def serves(self, model: str) -> bool:
        """Whether a request for the model, of a tenant that may be anywhere, could run in another cell."""
        asked = CellRequest(model, 1, 0, promised_s=1.0, avoid=frozenset((self.home,)))
        return choose(asked, self._offers(asked), self._rules).cell is not None

    def reachable(self) -> list[CellReport]:
        """Return the reports of the other cells that can take requests, the nearest first."""
        now = self._clock.now()
        near = sorted(
            (peer.network_s or 0.0, name)
            for name, peer in self._peers.items()
            if not peer.why and self._view.state(name, now).usable
        )
        found = [self._view.report(name) for _, name in near]
        return [each for each in found if each is not None]

    def leave_home(self) -> None:
        """Move requests that wait here for a model without workers, if another cell can run them: some at a
        time. Whether any cell can does not depend on a request's size, so that it is asked once for all that
        are alike."""
        missing = {model for model, why in self._router.not_ready_models().items() if why is not None}
        if not missing:
            return
        moved, nowhere = 0, set[tuple[object, ...]]()
        for stream in list(self._live.values()):
            if stream.cell != self.home or stream.begun or stream.request.model not in missing:
                continue
            needs = frozenset(self._features.needs(stream.request))
            where = self._residence(stream.request)
            alike = (stream.request.model, needs, where, frozenset(stream.tried))
            if alike in nowhere:
                continue
            if self._choice(stream, avoid=frozenset((self.home,))).cell is None:
                nowhere.add(alike)
                continue
            self._router.cancel(stream.request.request_id)
            stream.tried.add(self.home)
            self._start_later(stream, None)
            if (moved := moved + 1) == MOST_LEAVING:
                return

    # -- StreamRouter

    def now(self) -> float:
        """See StreamRouter."""
        return self._clock.now()

    def ended(self, stream: CellStream, *, answered: bool = True) -> None:
        """See StreamRouter."""
        self._live.pop(stream.request.request_id, None)
        if answered and stream.cell != self.home:
            self._view.answered(stream.cell)

    def lost(self, stream: CellStream) -> None:
        """See StreamRouter."""
        self.losses[stream.cell] += 1
        self._view.failed(stream.cell, self._clock.now())

    def moved(self, stream: CellStream, error: KvasirError, summary: RequestSummary | None) -> bool:
        """See StreamRouter."""
        if self._live.get(stream.request.request_id) is not stream:
            return False
        if summary is None or error.code == "shutting_down":
            stream.moves += 1
            stream.tried = {stream.cell}
        else:
            stream.tried.add(stream.cell)
        waits_at_home = not stream.begun and self.home not in stream.tried
        if stream.moves > MAX_MOVES or (self._choice(stream).cell is None and not waits_at_home):
            return False
        self._start_later(stream, error)
        return True

    def explained(self, stream: CellStream, error: KvasirError) -> KvasirError:
        """See StreamRouter."""
        needs = self._features.needs(stream.request)
        if not needs or stream.begun or not isinstance(error, CapacityError):
            return error
        if media_bytes(stream.request) > MAX_REQUEST_BYTES:
            why = f"media of more than {MAX_REQUEST_BYTES >> 20} MiB are not sent to other cells"
        else:
            candidates = self._choice(stream).candidates
            why = "; ".join(f"{each.cell}: {each.refused}" for each in candidates if each.cell != self.home)
        message = f"{error.message} With {' and '.join(needs.values())}, no other cell takes it: {why}."
        return CapacityError(message, code=error.code, retry_after_s=error.retry_after_s)

    def broken(self, stream: CellStream, error: KvasirError) -> None:
        """See StreamRouter."""

        def end() -> None:
            if self._live.get(stream.request.request_id) is stream:
                self._cancel_at(stream)
                stream.fail(error)

        asyncio.get_running_loop().call_soon(end)

    # -- inside

    def _start_later(self, stream: CellStream, error: KvasirError | None) -> None:
        def start() -> None:
            if self._live.get(stream.request.request_id) is not stream:
                return
            try:
                self._start(stream)
            except KvasirError as refusal:
                stream.fail(refusal if error is None or not isinstance(error, CapacityError) else error)

        asyncio.get_running_loop().call_soon(start)

    def _start(self, stream: CellStream) -> None:
        """Give a request to a cell. Raise the error of the last one that was tried."""
        refusal: KvasirError | None = None
        while True:
            choice = self._choice(stream)
            if choice.cell is None:
                break
            try:
                self._give(stream, choice.cell, choice.reason)
            except CapacityError as error:
                if error.code in OWN_LOAD:
                    raise
                refusal = error
                stream.tried.add(choice.cell)
            else:
                return
        if refusal is not None:
            raise self.explained(stream, refusal)
        if stream.begun or self.home in stream.tried:
            raise CapacityError("No cell can take the request.", code="no_workers")
        # It knows best what is missing, and may start workers.
        self._give(stream, self.home, choice.reason)

    def _give(self, stream: CellStream, cell: str, reason: CellReason) -> None:
        stream.cell, stream.reason, stream.sent_s = cell, str(reason), self._clock.now()
        stream.revision = self._revision(cell, stream.request.model)
        if cell == self.home:
            self._router.submit(stream.next_request(), stream)
        else:
            stream.follow()
            self._peers[cell].submit(stream.next_request(), stream)
            self._view.sent(cell, stream.request.model, stream.revision, len(stream.request.tokens))
        self.counts[cell, stream.reason] += 1

    def _choice(self, stream: CellStream, avoid: frozenset[str] = frozenset()) -> CellChoice:
        request = stream.request
        asked = CellRequest(
            request.model,
            prompt_tokens=len(request.tokens),
            output_tokens=request.sampling.max_tokens or self._default_output,
            promised_s=request.slo.ttft_s,
            residency=self._residence(request),
            revision=stream.revision or None if stream.begun else None,
            avoid=avoid | stream.tried,
            needs=self._features.needs(request),
        )
        return choose(asked, self._offers(asked), self._rules)

    def _residence(self, request: Request) -> frozenset[str] | None:
        """Return the cells in which a request may run, None for all."""
        return frozenset((self.home,)) if _stays(request) else self._residency.of(request.tenant)

    def _offers(self, asked: CellRequest) -> list[CellOffer]:
        """Return the cells, without those that this cell cannot reach or that have another tokenizer."""
        now, own = self._clock.now(), self._own.latest()
        network = {name: max(peer.network_s or 0.0, _NEAREST_S) for name, peer in self._peers.items()}
        offers = offers_of(self._view, own, asked, network, now)
        return rated([self._reachable(offer, asked.model) for offer in offers])

    def _reachable(self, offer: CellOffer, model: str) -> CellOffer:
        if offer.cell == self.home:
            return offer
        peer = self._peers[offer.cell]
        if peer.why:
            return replace(offer, state=CellState.LOST, report=None, why=peer.why)
        if peer.tokenizers.get(model) != self._tokenizers.get(model):
            return replace(offer, report=None)
        return offer

    def _revision(self, cell: str, model: str) -> str:
        report = self._own.latest() if cell == self.home else self._view.report(cell)
        known = [] if report is None else [each for each in report.models if each.model == model]
        return max(known, key=lambda each: each.ready).revision if known else ""

    def _cancel_at(self, stream: CellStream) -> None:
        if stream.cell == self.home:
            self._router.cancel(stream.request.request_id)
        else:
            self._peers[stream.cell].cancel(stream.request.request_id)


def rated(offers: Sequence[CellOffer]) -> list[CellOffer]:
    """Return the offers, where a cell that has computed no prompt yet has the rate of the fastest other: by a
    rate of 0 it would seem to compute them in no time."""
    rates = [0.0 if each.report is None else each.report.prefill_tokens_per_s for each in offers]
    fastest = max(rates, default=0.0)
    if not fastest or all(rates):
        return list(offers)
    return [
        each
        if each.report is None or rate
        else replace(each, report=structs.replace(each.report, prefill_tokens_per_s=fastest))
        for each, rate in zip(offers, rates, strict=True)
    ]


def _stays(request: Request) -> bool:
    """Whether a request runs at home in any case."""
    return bool(
        media_bytes(request) > MAX_REQUEST_BYTES
        or request.worker
        or request.sampling.prompt_logprobs is not None
    )
