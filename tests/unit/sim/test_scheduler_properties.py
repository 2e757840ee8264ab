"""The simulated scheduler under random histories, over an alphabet of two tokens and very few blocks.

Small numbers make prefixes collide, blocks run out and sequences preempt each other within a few
operations. After each one, every block is accounted for, and what the cache reported adds up to what it
holds; at the end of each history, every request has ended once, with the tokens that the model alone would
give.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kit.engines.recorder import DeltaRecorder

from kvasir.core.requests import EngineRequest, FinishReason, KvHandoff, Leg, Sampling, StepBatch, token_ids
from kvasir.native import PrefixTree, Shadow, chain_hashes, root_hash
from kvasir_workers.engines.sim.blocks import hash_prompt
from kvasir_workers.engines.sim.blocks import root_hash as engine_root
from kvasir_workers.engines.sim.model import Context, SimModel
from kvasir_workers.engines.sim.output import SimOutput
from kvasir_workers.engines.sim.reporting import CacheReport
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import SimLimits, SimPullOrder

MODEL = SimModel(vocab_size=2, eos_token_id=0)
CONTEXT = 9
BLOCK = 2


class Follower:
    """Stands where a worker's record does, and applies each log to a router's tree at once."""

    def __init__(self) -> None:
        self._shadow = Shadow(1, lambda salt, adapter: root_hash("m", salt, adapter))
        self._tree = PrefixTree(1 << 20, 0)
        self._groups = [self._tree.add_group()]

    def store(
        self, rank: int, parent: int | None, keys: Any, tokens: Any, size: int, *, salt: str, adapter: str
    ) -> None:
        self._shadow.store(rank, 0, parent, keys, tokens, size, salt, adapter)
        self._tree.apply(self._groups, self._shadow.take_log())

    def remove(self, rank: int, keys: Any) -> None:
        self._shadow.remove(rank, 0, keys)
        self._tree.apply(self._groups, self._shadow.take_log())

    @property
    def held(self) -> int:
        assert self._shadow.unnamed == 0
        return self._tree.held(self._groups[0], 0)

    def depth(self, tokens: array[int], salt: str) -> int:
        depths = array("I", bytes(16))
        self._tree.match(chain_hashes(tokens, BLOCK, root_hash("m", salt)), depths)
        return depths[0]


def _reference(request: EngineRequest, index: int) -> list[int]:
    """What the choice must be, without any scheduling."""
    sampling = request.sampling
    room = CONTEXT - len(request.tokens)
    output = SimOutput(MODEL, sampling, min(room, sampling.max_tokens or room))
    context = Context(0, None, sampling, index)
    context.extend(request.tokens)
    tokens: list[int] = []
    while True:
        emitted = output.grow(context)
        context.append(emitted.token)
        tokens.append(emitted.token)
        if emitted.finish is not None:
            return tokens


class History(RuleBasedStateMachine):
    """One engine, driven by hand."""

    @initialize(
        chunked=st.booleans(),
        caching=st.booleans(),
        recompute=st.booleans(),
        overlap=st.booleans(),
        blocks=st.integers(5, 9),
    )
    def begin(self, chunked: bool, caching: bool, recompute: bool, overlap: bool, blocks: int) -> None:
        self.follower = Follower() if caching else None
        self.scheduler = Scheduler(
            SimLimits(
                block_size=BLOCK,
                blocks=blocks,
                bytes_per_block=10,
                max_model_len=CONTEXT,
                max_seqs=3,
                step_tokens=4,
                chunked_prefill=chunked,
                prefix_caching=caching,
                lease_s=10.0,
                recompute_on_failure=recompute,
                max_live=8,
                overlap=overlap and chunked,
            ),
            MODEL,
            worker_id="w",
            epoch=1,
            report=CacheReport(cast(Any, self.follower), 0, BLOCK) if caching else None,
        )
        self.recorder = DeltaRecorder()
        self.requests: dict[str, EngineRequest] = {}
        self.pulls: list[SimPullOrder] = []
        self.now = 0.0

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=CONTEXT),
        leg=st.sampled_from(Leg),
        sampling=st.builds(
            Sampling,
            n=st.integers(1, 3),
            max_tokens=st.integers(1, CONTEXT) | st.none(),
            ignore_eos=st.booleans(),
        ),
        priority_and_salt=st.tuples(st.integers(0, 1), st.sampled_from(["", "s"])),
    )
    def submit(
        self, tokens: list[int], leg: Leg, sampling: Sampling, priority_and_salt: tuple[int, str]
    ) -> None:
        priority, salt = priority_and_salt
        request = EngineRequest(
            request_id=f"r{len(self.requests)}",
            tokens=token_ids(tokens),
            sampling=sampling,
            leg=leg,
            handoff=KvHandoff("elsewhere", 1, 1.0, 1, b"") if leg is Leg.DECODE else None,
            priority=priority,
            salt=salt,
        )
        self.requests[request.request_id] = request
        self.scheduler.submit(request, self.now)
        self._deliver()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.requests))), self.now)
        self._deliver()

    @rule(data=st.data(), interrupt=st.booleans())
    def step(self, data: st.DataObject, interrupt: bool) -> None:
        step = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self.pulls += step.pulls
        if interrupt and step.work:
            scheduled = sorted({sequence.live.request.request_id for sequence, _ in step.work})
            self.scheduler.abort(data.draw(st.sampled_from(scheduled)), self.now)
            self.scheduler.check_integrity()
        self.now += 0.1
        self.scheduler.complete(self.now)
        self._deliver()

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), well=st.booleans())
    def end_a_pull(self, data: st.DataObject, well: bool) -> None:
        order = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        self._end_pull(order, well)

    @rule(number=st.integers(1, 6))
    def release(self, number: int) -> None:
        self.scheduler.release(f"w/1/0/{number}")

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.expire(self.now)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.recorder.violations == []

    @invariant()
    def reports_add_up_to_the_cache(self) -> None:
        if not hasattr(self, "scheduler") or self.follower is None:
            return
        cached = self.scheduler.cached()
        assert self.follower.held == len(cached)
        for request_id, request in self.requests.items():
            for tokens in self._contexts(request_id, request):
                depth = self.follower.depth(tokens, request.salt)
                assert depth == self._found(cached, tokens, request.salt)

    def _contexts(self, request_id: str, request: EngineRequest) -> Sequence[array[int]]:
        choices = self.recorder.request(request_id).choices.values()
        return [request.tokens, *(request.tokens + token_ids(choice.tokens) for choice in choices)]

    @staticmethod
    def _found(cached: set[bytes], tokens: array[int], salt: str) -> int:
        digests = hash_prompt(engine_root(salt, None), tokens, BLOCK)[: len(tokens) // BLOCK]
        return next((at for at, digest in enumerate(digests) if digest not in cached), len(digests))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._run_dry()
        for request_id, request in self.requests.items():
            recorded = self.recorder.request(request_id)
            assert recorded.last is not None, f"{request_id} has not ended"
            if request.leg is Leg.PREFILL:
                continue
            for index, choice in recorded.choices.items():
                if choice.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    assert choice.tokens == _reference(request, index)
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.kv_usage, load.kv_blocks_leased) == (0, 0, 0.0, 0)

    def _run_dry(self) -> None:
        for _ in range(1000):
            self.now += 1.0
            self.scheduler.expire(self.now)
            step = self.scheduler.schedule(self.now)
            self.scheduler.complete(self.now)
            self.scheduler.check_integrity()
            self._deliver()
            for order in self.pulls + step.pulls:
                self._end_pull(order, True)
            self.pulls = []
            if all(self.recorder.request(r).last for r in self.requests) and not len(self.scheduler.leases):
                return

    def _end_pull(self, order: SimPullOrder, well: bool) -> None:
        if well:
            self.scheduler.pulled(order, 0.1)
        else:
            self.scheduler.pull_failed(order, 0.1, "io", self.now)
        self._deliver()

    def _deliver(self) -> None:
        self.recorder(StepBatch(self.scheduler.take_deltas(), self.scheduler.load()))


TestHistory = History.TestCase
TestHistory.settings = settings(stateful_step_count=40, deadline=None, derandomize=True)
