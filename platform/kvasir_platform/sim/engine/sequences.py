"""The sequences of a simulated engine: which of them wait, compute their prompts, decode, or move their KV.

Decisions follow vLLM's scheduler: first come, first served; what came last makes room; nothing is admitted in
a step that had to make room.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from kvasir.core.requests import Leg
from kvasir_platform.sim.engine.kv_room import KvRoom, restart
from kvasir_platform.sim.engine.options import Batching, Preemption
from kvasir_platform.sim.engine.replica import EngineReplica
from kvasir_platform.sim.engine.sequence import EngineLeg, EngineTotals
from kvasir_platform.sim.replay.cache import BlockCache

_NEVER = math.inf
# Of a token: what is smaller counts as generated.
_EPSILON = 1e-9

PromptParts = list[tuple[EngineLeg, int]]


class BatchSequences:
    """All sequences of one engine. `steps` counts the steps in which streams got tokens, `kv_tokens` is what
    streams read in the next one, and `delay_s` what moves of KV add to it. Of what happened since the caller
    looked: `computed` prompts and `ended` legs."""

    def __init__(self, replica: EngineReplica, cache: BlockCache) -> None:
        self.totals = EngineTotals()
        self.queue: deque[EngineLeg] = deque()
        self.prefilling: list[EngineLeg] = []
        self.streams: list[EngineLeg] = []
        self.ready: list[tuple[float, int, EngineLeg]] = []
        self.computed: list[EngineLeg] = []
        self.ended: list[EngineLeg] = []
        self.steps = 0
        self.kv_tokens = self.delay_s = 0.0
        self.blocked = self._preempted = False
        self._replica = replica
        self._options = options = replica.options
        self._room = KvRoom(cache, replica.memory.block_tokens, options)
        self._cache = cache
        self._rate = options.tokens_per_step
        self._continuous = options.batching is Batching.CONTINUOUS
        self._mixes = options.chunked and self._continuous
        self._block_bytes = replica.kv_token_bytes * replica.memory.block_tokens
        self._link_free_s = 0.0
        self._admitted = 0

    @property
    def running(self) -> int:
        """Sequences that hold a seat."""
        return len(self.prefilling) + len(self.streams) + len(self.ready)

    @property
    def mixes(self) -> bool:
        """Whether a step may hold prompts and streams together."""
        return self._mixes

    @property
    def takes_more(self) -> bool:
        """Whether something in the queue may join the next step."""
        return (
            bool(self.queue) and self._continuous and not self.blocked and self.running < self._options.most
        )

    @property
    def legs(self) -> tuple[EngineLeg, ...]:
        """All that waits or runs and has not ended."""
        every = (*self.queue, *self.prefilling, *self.streams, *(each[2] for each in self.ready))
        return tuple(each for each in every if not each.ended)

    def add(self, leg: EngineLeg) -> None:
        """Queue a leg. Raises ValueError if the memory can never hold it."""
        leg.target = leg.prompt_tokens
        tokens = leg.prompt_tokens + leg.wanted + self._rate
        if self._room.blocks_of(tokens) > self._replica.memory.blocks:
            raise ValueError(f"{tokens:.0f} tokens are more than the KV memory holds")
        self.queue.append(leg)

    def let_go(self, leg: EngineLeg) -> None:
        """Release the blocks of a prefill leg that has ended."""
        self._room.release(leg, stream=False, computed=True)
        self.blocked = False

    # -- steps ---------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> PromptParts:
        """Take what has arrived, make room, and return the prompt tokens of the next step."""
        while self.ready and self.ready[0][0] <= now:
            self._arrived(heappop(self.ready)[2], now)
        self._preempted = self._make_room()
        self._room.grow(self.streams, self.steps + 1)
        if not self._continuous:
            self._form_batch(now)
        return self._prompts(now, admit=self._continuous and not self._preempted)

    def decode_steps(self) -> int:
        """Return how many steps the streams can run before one ends, memory is full, or the queue is looked
        at again; at least one."""
        if self._preempted:
            return 1
        first = min(each.end_step for each in self.streams if not each.ended) - self.steps
        return max(1, self._room.steps_within(self.streams, self.steps, first))

    def decoded(self, steps: int) -> int:
        """The streams have run so many steps. Return how many of them got tokens."""
        streams = self.streams
        self.steps += steps
        self.kv_tokens += self._rate * len(streams) * steps
        self._room.grow(streams, self.steps)
        live = 0
        for each in streams:
            if not each.ended:
                live += 1
                each.generated += self._rate * steps
        return live

    def prefilled(self, parts: tuple[tuple[EngineLeg, int], ...], now: float) -> None:
        """These prompt tokens were computed."""
        for leg, tokens in parts:
            leg.computed += tokens
            self.totals.prefilled_tokens += tokens
            if leg.computed == leg.target:
                self.prefilling.remove(leg)
                self._room.fill(leg)
                self._complete(leg, now)

    def end_streams(self, now: float) -> None:
        """Let streams leave that have all of their tokens; the streams of a closed batch leave together."""
        done = [each for each in self.streams if each.end_step <= self.steps and not each.ended]
        for each in done:
            self._end(each, now)
        if self._continuous:
            for each in done:
                self._leave(each)
        elif self.streams and not self.prefilling and all(each.ended for each in self.streams):
            for each in list(self.streams):
                self._leave(each)

    def batch_due_s(self, now: float) -> float:
        """Return when a closed batch may begin, if nothing more arrives; infinity for continuous batches."""
        options = self._options
        if not self.queue or self._continuous or self.running:
            return _NEVER
        if options.batching is Batching.STATIC or len(self.queue) >= options.most:
            return now
        return self.queue[0].queued_s + options.wait_s

    # -- admission -------------------------------------------------------------------------------------

    def _form_batch(self, now: float) -> None:
        """Admit what waits, as long as it fits with all of its output."""
        if self.running or self.batch_due_s(now) > now:
            return
        longest = max(leg.output_tokens for leg in list(self.queue)[: self._options.most])
        while self.queue and self.running < self._options.most and self._admit(now, longest):
            pass

    def _prompts(self, now: float, *, admit: bool) -> PromptParts:
        options, chunked = self._options, self._options.chunked
        budget = options.step_tokens
        if self._mixes:
            budget -= len(self.streams) * (1 + options.lookahead)
        parts: PromptParts = []
        self.blocked = False
        for leg in self.prefilling:
            if budget <= 0:
                return parts
            budget -= self._take(leg, budget, parts)
        while admit and self.queue and budget > 0 and self.running < options.most:
            leg = self.queue[0]
            if not chunked and parts and leg.target > budget:
                break
            if not self._admit(now, None):
                self.blocked = True
                break
            if self.prefilling and self.prefilling[-1] is leg:
                budget -= self._take(leg, budget, parts)
        return parts

    def _take(self, leg: EngineLeg, budget: int, parts: PromptParts) -> int:
        left = leg.target - leg.computed
        tokens = min(left, budget) if self._options.chunked else left
        parts.append((leg, tokens))
        return tokens

    def _admit(self, now: float, longest: int | None) -> bool:
        """Begin the first of the queue, if there is room for it."""
        leg = self.queue[0]
        if not self._room.admit(leg, longest):
            return False
        self.queue.popleft()
        self._admitted += 1
        leg.order = self._admitted
        leg.started_s = leg.started_s or now
        links = self._replica.links
        if leg.swapped:
            self._move(leg, now + leg.blocks * self._block_bytes * links.cpu_byte_s)
            return True
        leg.computed = leg.hit.blocks * self._replica.memory.block_tokens
        totals = self.totals
        if not leg.preemptions:
            leg.cached_tokens = leg.computed
            totals.queried_tokens += leg.target
            totals.hit_tokens += leg.computed
        if leg.pulls:
            leg.moved_bytes = (leg.target - leg.computed) * self._replica.kv_token_bytes
            self._link_free_s = max(now, self._link_free_s) + leg.moved_bytes * links.byte_s
            self._move(leg, self._link_free_s + links.fixed_s)
        elif leg.hit.from_cpu:
            load_s = leg.hit.from_cpu * self._block_bytes * links.cpu_byte_s
            leg.load_s += load_s
            totals.loads += 1
            totals.loaded_blocks += leg.hit.from_cpu
            totals.load_s += load_s
            self._move(leg, now + load_s)
        else:
            self.prefilling.append(leg)
        return True

    def _move(self, leg: EngineLeg, ready_s: float) -> None:
        heappush(self.ready, (ready_s, leg.order, leg))

    def _arrived(self, leg: EngineLeg, now: float) -> None:
        """Blocks of a sequence came from CPU memory, or from another worker."""
        if leg.swapped:
            self._join(leg, leg.base)
        elif leg.pulls:
            self._room.fill(leg)
            self._complete(leg, now)
        else:
            self.prefilling.append(leg)

    # -- prompts that become streams, and streams that end ---------------------------------------------

    def _complete(self, leg: EngineLeg, now: float) -> None:
        """The prompt is complete, and with it comes a token unless it was pulled."""
        if not leg.computed_s:
            leg.computed_s = now
            self.computed.append(leg)
        if not leg.pulls:
            leg.generated += 1.0
            leg.first_s = leg.first_s or now
        if leg.leg is Leg.PREFILL:
            self._end(leg, now)
            return
        self._join(leg, leg.prompt_tokens + max(1.0, leg.generated))
        if leg.end_step <= self.steps:
            self._end(leg, now)
            if self._continuous:
                self._leave(leg)

    def _join(self, leg: EngineLeg, length: float) -> None:
        leg.base = length - self._rate * self.steps
        left = leg.output_tokens - leg.generated
        leg.end_step = self.steps + max(0, math.ceil(left / self._rate - _EPSILON))
        self._room.join(leg)
        self.streams.append(leg)
        self.kv_tokens += length

    def _end(self, leg: EngineLeg, now: float) -> None:
        leg.ended = True
        leg.finished_s = now
        self.totals.generated_tokens += leg.wanted
        self.ended.append(leg)

    def _leave(self, leg: EngineLeg) -> None:
        """A stream gives back its seat and its memory."""
        self.streams.remove(leg)
        self.kv_tokens -= leg.base + self._rate * self.steps
        self._room.release(leg, stream=True, computed=True)

    # -- preemption ------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Preempt what came last until the streams have room for a step. Return whether any was."""
        preempted = False
        while self.streams and self._room.needs(self.streams, self.steps + 1) > self._cache.room:
            self._preempt(max((*self.streams, *self.prefilling), key=lambda each: each.order))
            preempted = True
        return preempted

    def _preempt(self, leg: EngineLeg) -> None:
        self.totals.preemptions += 1
        leg.preemptions += 1
        if leg in self.prefilling:
            self.prefilling.remove(leg)
            self._room.release(leg, stream=False, computed=False)
            restart(leg, keeps_output=True)
        else:
            length = leg.base + self._rate * self.steps
            self._leave(leg)
            if self._options.preemption is Preemption.SWAP:
                leg.base, leg.swapped = length, True
                blocks = self._room.blocks_of(length)
                self.delay_s += blocks * self._block_bytes * self._replica.links.cpu_byte_s
            else:
                restart(leg, keeps_output=self._options.preemption is Preemption.RECOMPUTE)
        self.queue.appendleft(leg)
