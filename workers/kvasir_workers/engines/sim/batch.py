"""The batch: which sequences run, which wait and why, and what the next step computes.

The policy is vLLM's: running sequences first, each with its missing tokens; then sequences whose KV has
arrived; then waiting ones, prompts in chunks, until the step's token budget, the batch or the blocks are used
up. When a running sequence finds no free block, the last in order is preempted: it frees its blocks and
restarts later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvasir.core.requests import Leg
from kvasir_workers.engines.sim.blocks import BlockPool, hash_prompt
from kvasir_workers.engines.sim.memory import SequenceMemory
from kvasir_workers.engines.sim.reporting import CacheReport
from kvasir_workers.engines.sim.state import Sequence, SequenceQueue, SequenceState, SimLimits, SimPullOrder


@dataclass(slots=True)
class PlannedStep:
    """What one engine step computes, the pulls that begin with it, and the sequences it preempted.

    `work` pairs sequences with their token counts; `prefill_tokens` are the prompt tokens among them.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    pulls: list[SimPullOrder] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    budget: int = 0
    prefill_tokens: int = 0

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Schedule `tokens` of a sequence."""
        self.work.append((sequence, tokens))
        self.budget -= tokens
        if tokens > 1 or sequence.output.generated == 0:
            self.prefill_tokens += tokens


@dataclass(slots=True)
class Counters:
    """Monotonic counters; see EngineLoad."""

    queries_tokens: int = 0
    hits_tokens: int = 0
    received_bytes: int = 0
    received: int = 0
    failed: int = 0
    preemptions: int = 0


class RunningBatch:
    """The queues of one engine and the memory of their sequences."""

    def __init__(self, limits: SimLimits, pool: BlockPool, report: CacheReport | None) -> None:
        self.counters = Counters()
        self._limits = limits
        self._pool = pool
        self._memory = SequenceMemory(pool, limits, report)
        self._waiting = SequenceQueue()
        self._ready = SequenceQueue()
        self._running = SequenceQueue()
        self._pulling: dict[str, Sequence] = {}

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for blocks, for KV, or for a place in the batch."""
        return len(self._waiting) + len(self._ready) + len(self._pulling)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.add(sequence, SequenceState.WAITING)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and free its blocks."""
        for queue, state in self._queues():
            if sequence.state is state:
                queue.remove(sequence)
        if sequence.state is SequenceState.PULLING:
            del self._pulling[sequence.live.request.request_id]
        self._memory.free(sequence)
        sequence.state = SequenceState.DONE

    def schedule(self, now: float) -> PlannedStep:
        """Decide what the next step computes. After an empty step nothing can run until a request, a pull or
        the end of a lease changes the state."""
        limits = self._limits
        whole = 0 if limits.chunked_prefill else limits.max_model_len
        step = PlannedStep(budget=max(limits.step_tokens, whole))
        preempted = self._schedule_running(step)
        if not (preempted and step.work):
            self._schedule_ready(step)
            self._schedule_waiting(step, now)
        return step

    def pulled(self, order: SimPullOrder, seconds: float) -> None:
        """Handle a pull whose blocks have arrived. Ignored if the request has ended."""
        leader = self._pulling.pop(order.request_id, None)
        if leader is None:
            return
        live = leader.live
        live.transferred_s = seconds
        prompt = len(live.request.tokens)
        reach = live.cached_tokens + order.missing * self._limits.block_size
        live.transferred_tokens = min(reach, prompt) - live.cached_tokens
        live.transferred_bytes = order.bytes
        self.counters.received += 1
        self.counters.received_bytes += order.bytes
        # The last token is computed again: its KV is known, its output is not.
        leader.computed = prompt - 1
        self._memory.store(leader, prompt)
        self._ready.add(leader, SequenceState.READY)
        shared = leader.blocks[: (prompt - 1) // self._limits.block_size]
        for other in live.sequences[1:]:
            self._memory.hold(other, list(shared))
            self._ready.add(other, SequenceState.READY)

    def pull_failed(self, order: SimPullOrder, seconds: float) -> bool:
        """Handle a failed pull: the prompt is computed. Return False if the request has ended."""
        leader = self._pulling.pop(order.request_id, None)
        if leader is None:
            return False
        leader.live.transferred_s = seconds
        self.counters.failed += 1
        self._ready.add(leader, SequenceState.READY)
        for other in leader.live.sequences[1:]:
            self._waiting.add(other, SequenceState.WAITING)
        return True

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that every unfinished one of `sequences` is in exactly one queue. Raise AssertionError."""
        unfinished = [s for s in sequences if s.state is not SequenceState.DONE]
        placed = [(queue[at], state) for queue, state in self._queues() for at in range(len(queue))]
        placed += [(sequence, SequenceState.PULLING) for sequence in self._pulling.values()]
        placed += [(s, SequenceState.HELD) for s in unfinished if s.state is SequenceState.HELD]
        if sorted(map(id, unfinished)) != sorted(id(s) for s, _ in placed):
            raise AssertionError("an unfinished sequence is in no queue, or in two")
        for sequence, state in placed:
            if sequence.state is not state:
                raise AssertionError(f"{sequence.key} is {sequence.state} but in the queue of {state}")
            if sequence.computed > len(sequence.blocks) * self._limits.block_size:
                raise AssertionError(f"{sequence.key} has more KV than blocks")
        if len(self._running) > self._limits.max_seqs:
            raise AssertionError("the batch is larger than allowed")

    def _queues(self) -> list[tuple[SequenceQueue, SequenceState]]:
        return [
            (self._waiting, SequenceState.WAITING),
            (self._ready, SequenceState.READY),
            (self._running, SequenceState.RUNNING),
        ]

    def _schedule_running(self, step: PlannedStep) -> bool:
        preempted = False
        at = 0
        while at < len(self._running) and step.budget > 0:
            sequence = self._running[at]
            tokens = min(sequence.pending, step.budget)
            if self._memory.grow(sequence, tokens):
                step.add(sequence, tokens)
                at += 1
                continue
            preempted = True
            self._preempt(self._running[len(self._running) - 1], self._running, step)
        return preempted

    def _schedule_ready(self, step: PlannedStep) -> None:
        while len(self._ready) and step.budget > 0 and len(self._running) < self._limits.max_seqs:
            sequence = self._ready[0]
            tokens = min(sequence.pending, step.budget)
            if tokens < sequence.pending and not self._limits.chunked_prefill:
                return
            if self._memory.grow(sequence, tokens):
                self._ready.remove(sequence)
                self._running.add(sequence, SequenceState.RUNNING)
                step.add(sequence, tokens)
            elif len(self._running) == 0:
                # No running sequence can free a block, so the last in order is preempted.
                self._preempt(self._ready[len(self._ready) - 1], self._ready, step)
            else:
                return

    def _schedule_waiting(self, step: PlannedStep, now: float) -> None:
        while len(self._waiting) and step.budget > 0:
            sequence = self._waiting[0]
            if sequence.live.request.leg is Leg.DECODE and sequence.live.admitted_s is None:
                admitted = self._begin_pull(sequence, step, now)
            else:
                admitted = self._begin_compute(sequence, step, now)
            if not admitted:
                return

    def _begin_compute(self, sequence: Sequence, step: PlannedStep, now: float) -> bool:
        if len(self._running) >= self._limits.max_seqs:
            return False
        length = len(sequence.tokens)
        # The last token is always computed: its output is what the request waits for.
        found = self._memory.find(sequence, (length - 1) // self._limits.block_size)
        cached = len(found) * self._limits.block_size
        tokens = min(length - cached, step.budget)
        whole = self._limits.blocks_for(length) - len(found)
        if not self._pool.can_take(whole, keeping=found):
            return False
        if not self._limits.chunked_prefill and tokens < length - cached:
            return False
        self._memory.hold(sequence, found)
        self._note_admission(sequence, cached, now)
        self._waiting.remove(sequence)
        self._running.add(sequence, SequenceState.RUNNING)
        self._memory.grow(sequence, tokens)
        step.add(sequence, tokens)
        return True

    def _begin_pull(self, sequence: Sequence, step: PlannedStep, now: float) -> bool:
        if len(self._pulling) >= self._limits.max_seqs:
            return False
        request = sequence.live.request
        prompt = len(request.tokens)
        found = self._memory.find(sequence, prompt // self._limits.block_size)
        first = len(found)
        fresh = self._limits.blocks_for(prompt) - first
        if request.handoff is None or not self._pool.can_take(fresh, keeping=found):
            return False
        # A block with only the last token is not pulled: that token is computed anyway.
        missing = max(0, self._limits.blocks_for(prompt - 1) - first)
        self._memory.hold(sequence, found)
        self._note_admission(sequence, sequence.computed, now)
        self._memory.extend(sequence, fresh)
        # If the pull fails, the cached prefix is used, up to the token that must be computed.
        sequence.computed = min(sequence.computed, prompt - 1)
        self._waiting.remove(sequence)
        sequence.state = SequenceState.PULLING
        self._pulling[request.request_id] = sequence
        step.pulls.append(
            SimPullOrder(
                request_id=request.request_id,
                handoff=request.handoff,
                hashes=tuple(hash_prompt(sequence.root, request.tokens, self._limits.block_size)),
                first=first,
                missing=missing,
                block_bytes=self._limits.bytes_per_block,
            )
        )
        return True

    def _note_admission(self, sequence: Sequence, cached: int, now: float) -> None:
        live = sequence.live
        if live.admitted_s is None:
            live.admitted_s = now
            live.cached_tokens = min(cached, len(live.request.tokens))
            self.counters.queries_tokens += len(live.request.tokens)
            self.counters.hits_tokens += live.cached_tokens

    def _preempt(self, sequence: Sequence, queue: SequenceQueue, step: PlannedStep) -> None:
        queue.remove(sequence)
        self._memory.free(sequence)
        self.counters.preemptions += 1
        step.preempted.append(sequence)
        self._waiting.add(sequence, SequenceState.WAITING)
