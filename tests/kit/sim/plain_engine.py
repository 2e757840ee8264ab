"""An engine that runs every step by itself: what the engine of `kvasir sim` must equal.

It has no prefix cache and pulls nothing. Blocks are plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.performance.step import PromptChunk
from kvasir_platform.sim.engine.options import Batching, Preemption
from kvasir_platform.sim.engine.replica import EngineReplica
from kvasir_platform.sim.engine.sequence import EngineLeg
from kvasir_platform.sim.engine.step_costs import StepCosts


@dataclass(eq=False)
class PlainSequence:
    """One request. `target` tokens are to be computed, of which `done` are; `got` output tokens were
    generated, the first and the last at these times; `ready` is when swapped KV is back."""

    number: int
    at: float
    prompt: int
    output: int
    target: int
    done: int = 0
    got: float = 0.0
    order: int = 0
    blocks: int = 0
    swapped: bool = False
    ready: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def length(self) -> float:
        return self.prompt + max(self.got, 1.0)


class PlainEngine:
    """Runs legs of whole requests to the end."""

    def __init__(self, replica: EngineReplica, legs: Sequence[EngineLeg]) -> None:
        self.replica, self.options = replica, replica.options
        self.costs = StepCosts(replica.model, replica.options)
        self.block = replica.memory.block_tokens
        self.block_s = replica.kv_token_bytes * self.block * replica.links.cpu_byte_s
        self.free = replica.memory.blocks
        self.closed = self.options.batching is not Batching.CONTINUOUS
        self.mixes = self.options.chunked and not self.closed
        self.arriving = [
            PlainSequence(x.number, x.queued_s, x.prompt_tokens, x.output_tokens, x.prompt_tokens)
            for x in legs
        ]
        self.every = {each.number: each for each in self.arriving}
        self.queue: list[PlainSequence] = []
        self.held: list[PlainSequence] = []
        self.now = 0.0
        self.admitted = self.preemptions = 0

    def run(self) -> dict[int, PlainSequence]:
        """All requests with their times, by number."""
        while self.arriving or self.queue or self.held:
            while self.arriving and self.arriving[0].at <= self.now:
                self.queue.append(self.arriving.pop(0))
            preempted, delay = self.make_room()
            if self.closed:
                self.form_batch()
            parts = self.parts(admit=not preempted and not self.closed)
            streams = self.streams() if self.mixes or not parts else []
            if parts or streams:
                self.step(parts, streams, delay)
            else:
                self.wait()
        return self.every

    def need(self, tokens: float) -> int:
        return math.ceil(tokens / self.block)

    def streams(self) -> list[PlainSequence]:
        return [x for x in self.held if x.done == x.target and x.ready <= self.now]

    def make_room(self) -> tuple[bool, float]:
        """Whether anything was preempted, and the seconds of moving KV to CPU memory."""
        delay, preempted = 0.0, False
        if self.closed:
            return False, 0.0
        while self.streams() and self.growth() > self.free:
            delay += self.preempt(max((x for x in self.held if x.ready <= self.now), key=lambda x: x.order))
            preempted = True
        for each in self.streams():
            more = max(0, self.need(each.length) - each.blocks)
            each.blocks += more
            self.free -= more
        return preempted, delay

    def growth(self) -> int:
        return sum(max(0, self.need(x.length) - x.blocks) for x in self.streams())

    def preempt(self, loser: PlainSequence) -> float:
        self.preemptions += 1
        self.held.remove(loser)
        self.queue.insert(0, loser)
        self.free += loser.blocks
        streams = loser.done == loser.target
        if streams and self.options.preemption is Preemption.SWAP:
            loser.swapped = True
            return self.need(loser.length) * self.block_s
        dropped = streams and self.options.preemption is Preemption.DROP
        loser.got = 0.0 if dropped else float(int(loser.got))
        loser.target, loser.done = loser.prompt + int(loser.got), 0
        return 0.0

    def form_batch(self) -> None:
        queue, options = self.queue, self.options
        if self.held or not queue:
            return
        full = len(queue) >= options.most or options.batching is Batching.STATIC
        if not full and queue[0].at + options.wait_s > self.now:
            return
        longest = max(x.output for x in queue[: options.most])
        while queue and len(self.held) < options.most and self.need(queue[0].target + longest) <= self.free:
            self.begin(self.need(queue[0].target + longest))

    def begin(self, blocks: int) -> PlainSequence:
        each = self.queue.pop(0)
        self.free -= blocks
        self.admitted += 1
        each.blocks, each.order = blocks, self.admitted
        self.held.append(each)
        return each

    def parts(self, *, admit: bool) -> list[tuple[PlainSequence, int]]:
        options, found = self.options, list[tuple[PlainSequence, int]]()
        budget = options.step_tokens
        budget -= len(self.streams()) * (1 + options.lookahead) if self.mixes else 0

        def take(each: PlainSequence) -> None:
            nonlocal budget
            tokens = min(budget, each.target - each.done) if options.chunked else each.target - each.done
            found.append((each, tokens))
            budget -= tokens

        for each in [x for x in self.held if x.done < x.target]:
            if budget > 0:
                take(each)
        while admit and self.queue and budget > 0 and len(self.held) < options.most:
            head = self.queue[0]
            wanted = self.need(head.length if head.swapped else head.target + 1)
            if wanted > self.free or (not options.chunked and found and head.target > budget):
                break
            self.begin(wanted)
            if head.swapped:
                head.ready, head.swapped = self.now + wanted * self.block_s, False
            else:
                take(head)
        return found

    def step(
        self, parts: list[tuple[PlainSequence, int]], streams: list[PlainSequence], delay: float
    ) -> None:
        context = sum(x.length for x in streams) / len(streams) if streams else 0.0
        if parts:
            chunks = [PromptChunk(tokens, x.done, x.done + tokens == x.target) for x, tokens in parts]
            self.now += self.costs.prompts(chunks, len(streams), context) + delay
        else:
            line = self.costs.line(len(streams), context)
            self.now += line.at_zero + line.slope * context + delay
        for each in streams:
            each.got += self.options.tokens_per_step
        for each, tokens in parts:
            each.done += tokens
            if each.done == each.target:
                each.got += 1.0
                each.first = each.first or self.now
                streams.append(each)
        for each in streams:
            if each.got >= each.output - 1e-9 and not each.last:
                each.last = self.now
        ended = [x for x in self.held if x.last]
        if not self.closed or len(ended) == len(self.held):
            for each in ended:
                self.held.remove(each)
                self.free += each.blocks

    def wait(self) -> None:
        due = [x.at for x in self.arriving[:1]] + [x.ready for x in self.held if x.ready > self.now]
        due += [self.queue[0].at + self.options.wait_s] if self.closed and self.queue else []
        self.now = min(due)
