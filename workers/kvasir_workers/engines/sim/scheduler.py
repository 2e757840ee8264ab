"""Continuous batching over paged KV, as a state machine without I/O, clock or tasks.

The shell alternates `schedule(now)`, the passing of the step's time, and `complete(now)`; requests may
come and go at any moment between. The policy is vLLM's: running sequences first, each with the tokens
that it lacks; then sequences whose KV has arrived; then waiting ones, prompts in chunks, until the
step's token budget, the batch or the blocks are used up. When a running sequence finds no block, the
last in order gives all of its own back and starts again later.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
)
from kvasir_workers.engines.sim.blocks import BlockPool, hash_prompt
from kvasir_workers.engines.sim.fabric import Ticket
from kvasir_workers.engines.sim.leases import LeaseTable
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.state import (
    Limits,
    Live,
    PullOrder,
    Sequence,
    SequenceQueue,
    State,
    make_sequences,
    refusal,
    refused,
)


@dataclass(slots=True)
class Step:
    """What one engine step computes, and the pulls that begin with it.

    `work` pairs sequences with their token counts; `prefill_tokens` are those of prompts.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    budget: int = 0
    prefill_tokens: int = 0

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Schedule `tokens` of a sequence."""
        self.work.append((sequence, tokens))
        self.budget -= tokens
        if tokens > 1 or sequence.output.tokens == 0:
            self.prefill_tokens += tokens


@dataclass(slots=True)
class Counters:
    """What only grows; see EngineLoad."""

    queries_tokens: int = 0
    hits_tokens: int = 0
    received_bytes: int = 0
    received: int = 0
    failed: int = 0
    preemptions: int = 0


class Scheduler:
    """One engine's requests, blocks and leases. `worker_id` and `epoch` name it in tickets."""

    def __init__(self, limits: Limits, model: SimModel, *, worker_id: str, epoch: int) -> None:
        self.limits = limits
        self._model = model
        self._worker_id = worker_id
        self._epoch = epoch
        self._pool = BlockPool(limits.blocks, caching=limits.prefix_caching)
        self.leases = LeaseTable(self._pool, limits.lease_s)
        self._live: dict[str, Live] = {}
        self._waiting = SequenceQueue()
        self._ready = SequenceQueue()
        self._running = SequenceQueue()
        self._pulling: dict[str, Sequence] = {}
        self._step = Step()
        self._deltas: list[Delta] = []
        self._arrivals = 0
        self._granted = 0
        self._counters = Counters()

    # -- requests come and go ----------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a leg, or refuse it with a delta."""
        if request.request_id in self._live:
            why: tuple[str, str] | None = ("duplicate_request", f"{request.request_id} is still live")
        elif len(self._live) >= self.limits.max_live:
            why = ("no_capacity", f"{self.limits.max_live} requests are live on this worker")
        else:
            why = refusal(request, self.limits)
        if why is not None:
            self._deltas.append(refused(request, *why))
            return
        self._arrivals += 1
        live = Live(request, arrived_s=now)
        live.sequences = make_sequences(live, self._model, self.limits, self._arrivals)
        live.unfinished = len(live.sequences)
        self._live[request.request_id] = live
        leader, *others = live.sequences
        self._waiting.add(leader, State.WAITING)
        for other in others:
            if request.leg is Leg.DECODE:
                other.state = State.HELD
            else:
                self._waiting.add(other, State.WAITING)

    def abort(self, request_id: str, now: float) -> bool:
        """End a leg with ABORT and free what it holds; False when it is not live."""
        return self._end_all(request_id, FinishReason.ABORT, now)

    def fail_all(self, code: str, message: str, now: float) -> None:
        """End every leg with ERROR: the engine dies."""
        for request_id in list(self._live):
            self._end_all(request_id, FinishReason.ERROR, now, code, message)

    def release(self, lease_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self.leases.end(lease_id)

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        self.leases.expire(now)

    # -- one step ----------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Decide what the next step computes. An empty step means: nothing can run until a request,
        a pull or the end of a lease changes something."""
        limits = self.limits
        chunk = limits.step_tokens if limits.chunked_prefill else max(limits.step_tokens, limits.max_model_len)
        step = Step(budget=chunk)
        preempted = self._schedule_running(step)
        if not (preempted and step.work):
            self._schedule_ready(step)
            self._schedule_waiting(step, now)
        self._step = step
        return step

    def complete(self, now: float) -> None:
        """The scheduled step has been computed: sequences without missing KV emit a token."""
        step, self._step = self._step, Step()
        for sequence, tokens in step.work:
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += tokens
            if sequence.pending == 0:
                self._emit(sequence, now)

    def take_deltas(self) -> tuple[Delta, ...]:
        """What is to be delivered, once."""
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    # -- KV from another worker --------------------------------------------------------------------

    def pulled(self, order: PullOrder, seconds: float) -> None:
        """The blocks of a pull have arrived. A request that has ended meanwhile is ignored."""
        leader = self._pulling.pop(order.request_id, None)
        if leader is None:
            return
        live = leader.live
        live.transferred_s = seconds
        prompt = len(live.request.tokens)
        live.transferred_tokens = prompt - live.cached_tokens if order.missing else 0
        live.transferred_bytes = order.bytes
        self._counters.received += 1
        self._counters.received_bytes += order.bytes
        # The last token is computed again: its KV is known, its output is not.
        leader.computed = prompt - 1
        self._store(leader, prompt)
        self._ready.add(leader, State.READY)
        shared = leader.blocks[: (prompt - 1) // self.limits.block_size]
        for other in live.sequences[1:]:
            self._pool.share(shared)
            other.blocks = list(shared)
            other.hashes = leader.hashes[: len(shared)]
            other.stored = len(shared)
            other.computed = len(shared) * self.limits.block_size
            self._ready.add(other, State.READY)

    def pull_failed(self, order: PullOrder, seconds: float, reason: str, now: float) -> None:
        """A pull ended badly: compute the prompt here, or fail, as the deployment says."""
        leader = self._pulling.pop(order.request_id, None)
        if leader is None:
            return
        leader.live.transferred_s = seconds
        self._counters.failed += 1
        if not self.limits.recompute_on_failure:
            message = f"the prompt's KV did not arrive: {reason}"
            self._end_all(order.request_id, FinishReason.ERROR, now, "transfer_failed", message)
            return
        self._ready.add(leader, State.READY)
        for other in leader.live.sequences[1:]:
            self._waiting.add(other, State.WAITING)

    # -- views -------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No leg is live."""
        return not self._live

    def load(self) -> EngineLoad:
        """See EngineLoad."""
        counters = self._counters
        running = len(self._running)
        unfinished = len(self._waiting) + len(self._ready) + len(self._pulling)
        return EngineLoad(
            running=running,
            waiting=unfinished,
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
        """Blocks are held exactly by live sequences and live leases, and every unfinished sequence is
        in exactly one place. Raises AssertionError with what differs."""
        sequences = [s for live in self._live.values() for s in live.sequences]
        self._pool.check_integrity((s.blocks for s in sequences), self.leases.blocks())
        placed = [(queue[at], state) for queue, state in self._queues() for at in range(len(queue))]
        placed += [(sequence, State.PULLING) for sequence in self._pulling.values()]
        placed += [(s, State.HELD) for s in sequences if s.state is State.HELD]
        unfinished = [s for s in sequences if s.state is not State.DONE]
        if sorted(map(id, unfinished)) != sorted(id(s) for s, _ in placed):
            raise AssertionError("an unfinished sequence is nowhere, or in two places")
        for sequence, state in placed:
            if sequence.state is not state:
                raise AssertionError(f"{sequence.key} is {sequence.state} and lies among {state}")
            if sequence.computed > len(sequence.blocks) * self.limits.block_size:
                raise AssertionError(f"{sequence.key} has more KV than blocks")
        if len(self._running) > self.limits.max_seqs:
            raise AssertionError("the batch is larger than allowed")

    # -- inside ------------------------------------------------------------------------------------

    def _queues(self) -> list[tuple[SequenceQueue, State]]:
        return [
            (self._waiting, State.WAITING),
            (self._ready, State.READY),
            (self._running, State.RUNNING),
        ]

    def _schedule_running(self, step: Step) -> bool:
        preempted = False
        at = 0
        while at < len(self._running) and step.budget > 0:
            sequence = self._running[at]
            tokens = min(sequence.pending, step.budget)
            if self._grow(sequence, tokens):
                step.add(sequence, tokens)
                at += 1
                continue
            preempted = True
            self._preempt(self._running[len(self._running) - 1], self._running)
        return preempted

    def _schedule_ready(self, step: Step) -> None:
        while len(self._ready) and step.budget > 0 and len(self._running) < self.limits.max_seqs:
            sequence = self._ready[0]
            tokens = min(sequence.pending, step.budget)
            if self._grow(sequence, tokens):
                self._ready.remove(sequence)
                self._running.add(sequence, State.RUNNING)
                step.add(sequence, tokens)
            elif len(self._running) == 0:
                # Nobody runs who could free a block: the last in order gives its own back.
                self._preempt(self._ready[len(self._ready) - 1], self._ready)
            else:
                return

    def _schedule_waiting(self, step: Step, now: float) -> None:
        while len(self._waiting) and step.budget > 0:
            sequence = self._waiting[0]
            if sequence.live.request.leg is Leg.DECODE and sequence.live.admitted_s is None:
                admitted = self._begin_pull(sequence, step, now)
            else:
                admitted = self._begin_compute(sequence, step, now)
            if not admitted:
                return

    def _begin_compute(self, sequence: Sequence, step: Step, now: float) -> bool:
        if len(self._running) >= self.limits.max_seqs:
            return False
        length = len(sequence.tokens)
        # The last token is always computed: its output is what the request waits for.
        found = self._find(sequence, (length - 1) // self.limits.block_size)
        cached = len(found) * self.limits.block_size
        tokens = min(length - cached, step.budget)
        whole = self.limits.blocks_for(length) - len(found)
        if not self._pool.can_take(whole, keeping=found):
            return False
        if not self.limits.chunked_prefill and tokens < length - cached:
            return False
        self._hold(sequence, found)
        self._note_admission(sequence, cached, now)
        self._waiting.remove(sequence)
        self._running.add(sequence, State.RUNNING)
        self._grow(sequence, tokens)
        step.add(sequence, tokens)
        return True

    def _begin_pull(self, sequence: Sequence, step: Step, now: float) -> bool:
        if len(self._pulling) >= self.limits.max_seqs:
            return False
        request = sequence.live.request
        prompt = len(request.tokens)
        found = self._find(sequence, prompt // self.limits.block_size)
        missing = self.limits.blocks_for(prompt) - len(found)
        if request.handoff is None or not self._pool.can_take(missing, keeping=found):
            return False
        self._hold(sequence, found)
        self._note_admission(sequence, sequence.computed, now)
        sequence.blocks += self._pool.take(missing)
        # If the pull fails, what was found serves, up to the token that must be computed.
        sequence.computed = min(sequence.computed, prompt - 1)
        self._waiting.remove(sequence)
        sequence.state = State.PULLING
        self._pulling[request.request_id] = sequence
        step.pulls.append(
            PullOrder(
                request_id=request.request_id,
                handoff=request.handoff,
                hashes=tuple(hash_prompt(sequence.root, request.tokens, self.limits.block_size)),
                missing=missing,
                bytes=missing * self.limits.bytes_per_block,
            )
        )
        return True

    def _find(self, sequence: Sequence, blocks: int) -> list[int]:
        if not self.limits.prefix_caching:
            return []
        sequence.hash_up_to(blocks, self.limits.block_size)
        return self._pool.lookup(sequence.hashes[:blocks])

    def _hold(self, sequence: Sequence, found: list[int]) -> None:
        self._pool.share(found)
        sequence.blocks = found
        sequence.stored = len(found)
        sequence.computed = len(found) * self.limits.block_size

    def _note_admission(self, sequence: Sequence, cached: int, now: float) -> None:
        live = sequence.live
        if live.admitted_s is None:
            live.admitted_s = now
            live.cached_tokens = min(cached, len(live.request.tokens))
            self._counters.queries_tokens += len(live.request.tokens)
            self._counters.hits_tokens += live.cached_tokens

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Hold the blocks for `tokens` more; False when there are too few."""
        reach = sequence.computed + tokens
        short = self.limits.blocks_for(reach) - len(sequence.blocks)
        if short > 0:
            if not self._pool.can_take(short):
                return False
            sequence.blocks += self._pool.take(short)
        self._store(sequence, reach)
        return True

    def _store(self, sequence: Sequence, reach: int) -> None:
        """Make the blocks that are full with `reach` tokens known. Steps run in order, so that whoever
        finds one reads it after it was written."""
        full = reach // self.limits.block_size
        if not self.limits.prefix_caching or full <= sequence.stored:
            return
        sequence.hash_up_to(full, self.limits.block_size)
        for at in range(sequence.stored, full):
            self._pool.store(sequence.blocks[at], sequence.hashes[at])
        sequence.stored = full

    def _preempt(self, sequence: Sequence, queue: SequenceQueue) -> None:
        queue.remove(sequence)
        self._let_go(sequence)
        self._counters.preemptions += 1
        self._waiting.add(sequence, State.WAITING)

    def _let_go(self, sequence: Sequence) -> None:
        self._pool.drop(sequence.blocks)
        sequence.blocks = []
        sequence.stored = 0
        sequence.computed = 0
