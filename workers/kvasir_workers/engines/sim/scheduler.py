"""The simulated engine's decisions as a state machine, without I/O, clock or tasks.

The shell alternates `schedule(now)`, waiting for the step's time, and `complete(now)`; requests may be
submitted and aborted at any moment between.
"""

from __future__ import annotations

from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
)
from kvasir_workers.engines.parts import taken_apart
from kvasir_workers.engines.sim.batch import PlannedStep, RunningBatch
from kvasir_workers.engines.sim.blocks import BlockPool, hash_prompt
from kvasir_workers.engines.sim.fabric import SimTicket
from kvasir_workers.engines.sim.leases import SimLeaseTable
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.reporting import CacheReport
from kvasir_workers.engines.sim.state import (
    Live,
    Sequence,
    SequenceState,
    SimLimits,
    SimPullOrder,
    make_sequences,
    refusal,
    refused,
)


class Scheduler:
    """One rank's requests, blocks and leases. `worker_id` and `epoch` identify the worker in tickets, `rank`
    distinguishes its leases from those of other ranks; changes of its prefix cache are passed to `report`."""

    def __init__(
        self,
        limits: SimLimits,
        model: SimModel,
        *,
        worker_id: str,
        epoch: int,
        rank: int = 0,
        report: CacheReport | None = None,
    ) -> None:
        self.limits = limits
        self._model = model
        self._worker_id = worker_id
        self._epoch = epoch
        self._rank = rank
        evicted = None if report is None else report.evicted
        self._pool = BlockPool(limits.blocks, caching=limits.prefix_caching, evicted=evicted)
        self._batch = RunningBatch(limits, self._pool, report)
        self.leases = SimLeaseTable(self._pool, limits.lease_s)
        self._live: dict[str, Live] = {}
        self._step = PlannedStep()
        self._deltas: list[Delta] = []
        self._arrivals = 0
        self._granted = 0
        self._closed: tuple[str, str] | None = None

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a leg, or refuse it with a delta."""
        if self._closed is not None:
            why: tuple[str, str] | None = self._closed
        elif request.request_id in self._live:
            why = ("duplicate_request", f"{request.request_id} is still live")
        elif len(self._live) >= self.limits.max_live:
            why = ("no_capacity", f"{self.limits.max_live} requests are live on this worker")
        else:
            why = refusal(request, self.limits, self._model)
        if why is not None:
            self._deltas.append(refused(request, *why))
            return
        self._arrivals += 1
        live = Live(request, arrived_s=now)
        live.sequences = make_sequences(live, self._model, self.limits, self._arrivals)
        live.unfinished = len(live.sequences)
        self._live[request.request_id] = live
        leader, *others = live.sequences
        self._batch.add(leader)
        for other in others:
            if request.leg is Leg.DECODE:
                other.state = SequenceState.HELD
            else:
                self._batch.add(other)

    def abort(self, request_id: str, now: float) -> bool:
        """End a leg with ABORT and free its blocks; return False if it is not live."""
        return self._end_all(request_id, FinishReason.ABORT, now)

    def close(self, code: str, message: str, now: float) -> None:
        """Fail the engine: every leg ends with ERROR, leases end, and later legs are refused."""
        self._closed = (code, message)
        self.leases.clear()
        for request_id in list(self._live):
            self._end_all(request_id, FinishReason.ERROR, now, code, message)

    def release(self, lease_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self.leases.end(lease_id)

    def expire(self, now: float) -> None:
        """End the leases past their deadline."""
        self.leases.expire(now)

    # -- one step ----------------------------------------------------------------------------------

    def schedule(self, now: float) -> PlannedStep:
        """Decide what the next step computes. After an empty step nothing can run until a request, a pull or
        the end of a lease changes the state."""
        self._step = self._batch.schedule(now)
        for sequence in self._step.preempted:
            # Its offered blocks are freed with the others.
            if sequence.live.offered is not None:
                self.leases.end(sequence.live.offered.lease_id)
        return self._step

    def complete(self, now: float) -> None:
        """Complete the scheduled step: sequences without missing KV emit a token."""
        step, self._step = self._step, PlannedStep()
        for sequence, tokens in step.work:
            if sequence.state is not SequenceState.RUNNING:
                continue
            sequence.computed += tokens
            if sequence.pending == 0:
                self._emit(sequence, now)
            elif self.limits.overlap and sequence.live.request.leg is Leg.PREFILL:
                self._offer_early(sequence, now)

    def take_deltas(self) -> tuple[Delta, ...]:
        """Return the deltas to be delivered, once."""
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    # -- KV from another worker --------------------------------------------------------------------

    def pulled(self, order: SimPullOrder, seconds: float) -> None:
        """Handle a pull whose blocks have arrived. Ignored if the request has ended."""
        self._batch.pulled(order, seconds)

    def pull_failed(self, order: SimPullOrder, seconds: float, reason: str, now: float) -> None:
        """Handle a failed pull: compute the prompt here, or fail, as the deployment configures."""
        if self._batch.pull_failed(order, seconds) and not self.limits.recompute_on_failure:
            message = f"the prompt's KV did not arrive: {reason}"
            self._end_all(order.request_id, FinishReason.ERROR, now, "transfer_failed", message)

    # -- views -------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Number of requests that have not ended, in any state."""
        return len(self._live)

    def is_live(self, request_id: str) -> bool:
        """Return whether this request has not ended."""
        return request_id in self._live

    def legs_of(self, adapter: str) -> int:
        """Return the number of requests with this adapter that have not ended."""
        return sum(live.request.adapter == adapter for live in self._live.values())

    def cached(self) -> set[bytes]:
        """Return the chained hashes of all blocks in the prefix cache."""
        return self._pool.known()

    def load(self) -> EngineLoad:
        """See EngineLoad."""
        counters = self._batch.counters
        return EngineLoad(
            running=self._batch.running,
            waiting=self._batch.waiting,
            kv_usage=self._pool.active / self._pool.total,
            kv_blocks_total=self._pool.total,
            kv_blocks_leased=self._pool.leased,
            prefix_queries_tokens=counters.queries_tokens,
            prefix_hits_tokens=counters.hits_tokens,
            transfer_bytes_received=counters.received_bytes,
            transfers_received=counters.received,
            transfers_failed=counters.failed,
            preemptions=counters.preemptions,
        )

    def check_integrity(self) -> None:
        """Check that blocks are held exactly by live sequences and live leases, that the offered blocks of a
        live sequence are computed, and that every unfinished sequence is in exactly one queue. Raise
        AssertionError with the difference."""
        sequences = [s for live in self._live.values() for s in live.sequences]
        for sequence in sequences:
            offered = sequence.live.offered
            lease = None if offered is None else self.leases.find(offered.lease_id)
            if lease is None:
                continue
            offers = len(lease.blocks)
            if list(lease.blocks) != sequence.blocks[:offers]:
                raise AssertionError(f"{sequence.key} offers blocks that are not its own")
            if offers * self.limits.block_size > sequence.computed:
                raise AssertionError(f"{sequence.key} offers what is not computed")
        self._pool.check_integrity((s.blocks for s in sequences), self.leases.blocks())
        self._batch.check_integrity(sequences)

    # -- inside ------------------------------------------------------------------------------------

    def _emit(self, sequence: Sequence, now: float) -> None:
        live = sequence.live
        request = live.request
        first = live.first_token_s is None
        if first:
            live.first_token_s = now
        if request.leg is Leg.PREFILL:
            handoff = self._offer_whole(sequence, now)
            self._finish(sequence)
            self._deltas.append(
                Delta(
                    request_id=request.request_id,
                    offset=0,
                    finish=FinishReason.LENGTH,
                    last=True,
                    usage=live.usage(),
                    timings=live.timings(now),
                    handoff=handoff,
                )
            )
            return
        emitted = sequence.output.grow(sequence.context)
        sequence.context.append(emitted.token)
        sequence.tokens.append(emitted.token)
        if emitted.finish is not None:
            self._finish(sequence)
        last = live.unfinished == 0
        tells_cached = first and live.cached_tokens > 0 and request.leg is Leg.FULL
        self._say(
            sequence,
            Delta(
                request_id=request.request_id,
                offset=emitted.offset,
                token_ids=(emitted.token,),
                text=emitted.text,
                index=sequence.index,
                logprobs=emitted.logprobs,
                finish=emitted.finish,
                stop_reason=emitted.stop_reason,
                last=last,
                usage=live.usage() if last or tells_cached else None,
                timings=live.timings(now) if last else None,
            ),
        )

    def _say(self, sequence: Sequence, delta: Delta) -> None:
        parser = sequence.parser
        self._deltas.append(delta if parser is None else taken_apart(delta, parser))

    def _offer_early(self, sequence: Sequence, now: float) -> None:
        """Offer the blocks that are full already."""
        live, full = sequence.live, sequence.computed // self.limits.block_size
        if live.offered is not None:
            self._extend(live.offered, sequence, full, now)
        elif full:
            live.offered = self._offer(sequence, full, now)
            self._deltas.append(Delta(request_id=live.request.request_id, offset=0, handoff=live.offered))

    def _offer_whole(self, sequence: Sequence, now: float) -> KvHandoff:
        """Offer the whole prompt, under the lease that it already has if that is live."""
        offered, blocks = sequence.live.offered, self.limits.blocks_for(sequence.computed)
        if offered is not None and self._extend(offered, sequence, blocks, now):
            return offered
        return self._offer(sequence, blocks, now)

    def _extend(self, offered: KvHandoff, sequence: Sequence, complete: int, now: float) -> bool:
        lease = self.leases.find(offered.lease_id)
        if lease is None:
            return False
        self.leases.extend(lease.lease_id, sequence.blocks[len(lease.blocks) : complete], now)
        return True

    def _offer(self, sequence: Sequence, complete: int, now: float) -> KvHandoff:
        """Hold the first `complete` blocks for pullers."""
        request = sequence.live.request
        self._granted += 1
        lease_id = f"{self._worker_id}/{self._epoch}/{self._rank}/{self._granted}"
        lease = self.leases.grant(lease_id, self._granted, sequence.blocks[:complete], now)
        ticket = SimTicket(
            worker_id=self._worker_id,
            epoch=self._epoch,
            hashes=tuple(hash_prompt(sequence.root, request.tokens, self.limits.block_size)),
        )
        return KvHandoff(
            lease_id=lease.lease_id,
            fence=lease.fence,
            ttl_s=self.limits.lease_s,
            blocks=self.limits.blocks_for(len(request.tokens)),
            ticket=ticket.encode(),
        )

    def _finish(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and free its blocks."""
        live = sequence.live
        self._batch.remove(sequence)
        live.unfinished -= 1
        if live.unfinished == 0:
            del self._live[live.request.request_id]

    def _end_all(
        self,
        request_id: str,
        finish: FinishReason,
        now: float,
        error: str | None = None,
        message: str | None = None,
    ) -> bool:
        """End every unfinished choice of a leg; return False if it is not live."""
        live = self._live.get(request_id)
        if live is None:
            return False
        if live.offered is not None:
            self.leases.end(live.offered.lease_id)
        for sequence in live.sequences:
            if sequence.state is SequenceState.DONE:
                continue
            self._finish(sequence)
            last = live.unfinished == 0
            delta = Delta(
                request_id=request_id,
                offset=sequence.output.tokens,
                text=sequence.output.flush(),
                index=sequence.index,
                finish=finish,
                last=last,
                usage=live.usage() if last else None,
                timings=live.timings(now) if last else None,
                error=error,
                error_message=message,
            )
            self._say(sequence, delta)
        return True
