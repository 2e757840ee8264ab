"""A simulated engine: batches of sequences, step by step as vLLM runs them, with equal steps run at once.

Every step gives each stream its token, and fills what is left of its token budget with prompts, which wait in
the order of arrival, for a seat and for memory. A step that computes prompts is run by itself. Steps that
only decode differ in nothing but the length of their streams: they are run at once, up to the next event, and
their times follow from the first and the last. What arrives in the middle of a step joins the next one."""

from __future__ import annotations

import math

from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import EngineLoad
from kvasir.performance.step import PromptChunk
from kvasir_platform.sim.engine.replica import EngineReplica
from kvasir_platform.sim.engine.sequence import EngineEvents, EngineLeg, EngineTotals
from kvasir_platform.sim.engine.sequences import BatchSequences, PromptParts
from kvasir_platform.sim.engine.step_costs import StepCosts
from kvasir_platform.sim.engine.step_run import GapBins, StepRun
from kvasir_platform.sim.replay.cache import BlockCache

_NEVER = math.inf


class BatchEngine:
    """One replica. `advance` must be called at `next_event_s`; `submit` and `let_go` at any time before.
    `slowness` multiplies the times of steps that begin. Replicas that are alike share `costs`."""

    def __init__(
        self, worker_id: str, replica: EngineReplica, cache: BlockCache, costs: StepCosts | None = None
    ) -> None:
        self.worker_id = worker_id
        self.cache = cache
        self.replica = replica
        self.slowness = 1.0
        self.next_event_s = _NEVER
        self._costs = costs or StepCosts(replica.model, replica.options)
        self._rate = replica.options.tokens_per_step
        self._batch = BatchSequences(replica, cache)
        self._run: StepRun | None = None
        self._boundary = self._stalled_s = 0.0

    # -- what is seen from outside -----------------------------------------------------------------

    @property
    def totals(self) -> EngineTotals:
        """What the engine did so far."""
        return self._batch.totals

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._batch.queue)

    @property
    def decoding(self) -> int:
        """Streams, with those of a closed batch that have ended."""
        return len(self._batch.streams)

    @property
    def prefilling(self) -> int:
        """Sequences whose prompt is computed or moved."""
        return len(self._batch.prefilling) + len(self._batch.ready)

    @property
    def request_s(self) -> float:
        """Seconds that a request takes to this engine, beside the steps that it computes if it does."""
        reached = self.replica.model.coefficients
        return (reached.busy_request_s or reached.request_s) if self._run is not None else reached.request_s

    @property
    def load(self) -> EngineLoad:
        """The load that the worker reports."""
        totals, memory = self.totals, self.replica.memory
        tiers: tuple[TierLoad, ...] = ()
        if memory.cpu_blocks:
            moved = int(totals.loaded_blocks * memory.block_tokens * self.replica.kv_token_bytes)
            cpu = TierLoad(
                Medium.CPU,
                loads=totals.loads,
                loaded_blocks=totals.loaded_blocks,
                loaded_bytes=moved,
                load_s=totals.load_s,
            )
            tiers = (cpu,)
        return EngineLoad(
            running=self._batch.running,
            waiting=len(self._batch.queue),
            kv_usage=self.cache.usage,
            kv_blocks_total=memory.blocks,
            prefix_queries_tokens=totals.queried_tokens,
            prefix_hits_tokens=totals.hit_tokens,
            preemptions=totals.preemptions,
            tiers=tiers,
        )

    def submit(self, leg: EngineLeg, now: float) -> None:
        """Accept a leg. Raises ValueError if the memory can never hold it."""
        self._batch.add(leg)
        self._touch(now)

    def let_go(self, leg: EngineLeg, now: float) -> None:
        """A prefill leg's blocks have been pulled, or nobody will pull them."""
        self._batch.let_go(leg)
        self._touch(now)

    def advance(self, now: float) -> EngineEvents:
        """Take the event that is due."""
        run, self._run = self._run, None
        self._boundary = max(now, self._boundary)
        batch = self._batch
        if run is not None:
            self._finish(run)
        self._schedule()
        for leg in batch.computed:
            if leg.pulls:
                # A pulled prompt comes without a token: the step that begins makes it.
                leg.first_s = self._boundary + (self._run.after(1) if self._run is not None else 0.0)
        found = EngineEvents(tuple(batch.computed), tuple(batch.ended))
        batch.computed.clear()
        batch.ended.clear()
        return found

    def stop(self, now: float) -> tuple[EngineLeg, ...]:
        """End at once. Return the legs that are lost, with the tokens that they had generated."""
        run = self._run
        if run is not None and run.decodes and now > run.start_s:
            done = self._rate * (run.steps_until(now) - 1)
            for each in self._batch.streams:
                each.generated += done
        self.next_event_s = _NEVER
        return self._batch.legs

    def _touch(self, now: float) -> None:
        """Something changed: let it join the next step."""
        if self._run is None:
            self.next_event_s = max(now, self._boundary)
        elif self._batch.takes_more:
            self._run.cut(now)
            self.next_event_s = self._run.end_s

    # -- steps ---------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Begin the next step, or the next steps, or wait."""
        batch, now = self._batch, self._boundary
        parts = batch.begin_step(now)
        if parts:
            self._run = self._prompt_step(parts)
        elif batch.streams:
            self._run = self._decode_run()
        else:
            ready_s = batch.ready[0][0] if batch.ready else _NEVER
            self.next_event_s = min(ready_s, batch.batch_due_s(now))
            return
        self.next_event_s = self._run.end_s

    def _prompt_step(self, parts: PromptParts) -> StepRun:
        batch = self._batch
        streams = len(batch.streams) if batch.mixes else 0
        context = batch.kv_tokens / streams if streams else 0.0
        chunks = [
            PromptChunk(tokens, leg.computed, leg.computed + tokens == leg.target) for leg, tokens in parts
        ]
        seconds = self._costs.prompts(chunks, streams, context) * self.slowness + self._delay()
        return StepRun(self._boundary, seconds, 0.0, 1, bool(streams), tuple(parts))

    def _decode_run(self) -> StepRun:
        batch = self._batch
        context = batch.kv_tokens / len(batch.streams)
        line = self._costs.line(len(batch.streams), context)
        first = (line.at_zero + line.slope * context) * self.slowness
        on_line = max(1, math.ceil((line.until - context) / self._rate))
        steps = min(batch.decode_steps(), on_line)
        if batch.delay_s:
            # A step that waits for KV is unlike those after it.
            first, steps = first + self._delay(), 1
        run = StepRun(self._boundary, first, line.slope * self._rate * self.slowness, steps, decodes=True)
        if batch.ready:
            run.cut(batch.ready[0][0])
        return run

    def _delay(self) -> float:
        delay_s, self._batch.delay_s = self._batch.delay_s, 0.0
        return delay_s

    def _finish(self, run: StepRun) -> None:
        """All steps of the run are done."""
        batch = self._batch
        seconds = run.after(run.steps)
        batch.totals.busy_s += seconds
        if run.decodes:
            live = batch.decoded(run.steps)
            self._count_gap(run.first_s + self._stalled_s, live)
            if run.steps > 1:
                self._count_gap((seconds - run.first_s) / (run.steps - 1), live * (run.steps - 1))
            self._stalled_s = 0.0
        elif batch.streams:
            self._stalled_s += seconds
        batch.prefilled(run.chunks, self._boundary)
        batch.end_streams(self._boundary)

    def _count_gap(self, seconds: float, streams: int) -> None:
        gaps, number = self.totals.gaps, GapBins.bin_of(seconds / self._rate)
        gaps[number] = gaps.get(number, 0.0) + streams * self._rate
