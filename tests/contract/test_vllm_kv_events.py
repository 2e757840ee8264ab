"""vLLM's KV events: what we lean on inside vLLM, and that the record made of them is the engine's cache.

When vLLM moves, the first tests fail and say which of our modules must follow; the last ones compare with a
real engine: a hit that the record foresees is the hit that the engine reports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.kv_follower import KvFollower
from tests.kit.engines.recorder import Recorded
from tests.kit.shared.engines import EngineRegistry, WantedEngine

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, LoraSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tenants import SharedPrefixSpec, TenancySpec
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import EngineRequest, Role, Sampling, token_ids
from kvasir.native import root_hash
from kvasir.native.salt_places import salt_after
from kvasir_workers.engines.vllm.events.kv_events import KvEvents
from kvasir_workers.engines.vllm.setup import arguments
from kvasir_workers.engines.vllm.setup.arguments import EventEndpoints, engine_arguments
from kvasir_workers.server.holdings import Holdings

pytestmark = pytest.mark.slow

BLOCK = 32
RING = 64
"""Batches of events that the engine keeps for those who missed them."""
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def vllm(runtime: Any) -> Any:
    """vLLM's module of that name."""
    import vllm.distributed.kv_events as module

    return module


# -- what we lean on -------------------------------------------------------------------------------


def test_events_are_maps_with_the_fields_that_the_shadow_reads(vllm: Any) -> None:
    import msgspec

    stored = vllm.BlockStored(
        block_hashes=[1 << 63],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name="ad",
        extra_keys=[("ad", "salt")],
    )
    removed = vllm.BlockRemoved(block_hashes=[1 << 63], medium="GPU")
    batch = vllm.KVEventBatch(ts=1.0, events=[stored, removed, vllm.AllBlocksCleared()])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert decoded[0] == 1.0
    kinds = [event["type"] for event in decoded[1]]
    assert kinds == ["BlockStored", "BlockRemoved", "AllBlocksCleared"], "the events' tags changed"
    wanted = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_name"}
    assert wanted | {"extra_keys"} <= set(decoded[1][0]), "BlockStored lost a field that Shadow.ingest reads"


def test_extra_keys_are_the_adapter_and_the_salt_of_the_first_block_or_of_its_place(vllm: Any) -> None:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys

    tagged = [(("lora", "ad"), ("cache_salt", "s")), (("lora", "ad"),), None]
    assert to_event_extra_keys(tagged) == [("ad", "s"), ("ad",), None], (
        "vLLM tells salts and adapters otherwise; Shadow.ingest takes the first block's apart"
    )
    _check_places_of_salts()


def _check_places_of_salts() -> None:
    """Salts that begin later go into the hash and the event of that block."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.request import Request

    from kvasir_workers.engines.vllm.events import salted_blocks

    salted_blocks.install()
    assert block_pool.generate_block_hash_extra_keys is not kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(4, sha256)

    def hashes(salt: str | None) -> list[bytes]:
        request = Request(
            request_id="r",
            prompt_token_ids=list(range(16)),
            sampling_params=SamplingParams(),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        keys = [block_pool.generate_block_hash_extra_keys(request, at, at + 4, 0)[0] for at in (0, 4, 8, 12)]
        if salt == salt_after(9, "r"):
            assert keys == [None, None, (("cache_salt", "kvasir-salt:r"),), None]
        return [bytes(each) for each in request.block_hashes]

    plain, red, blue = hashes(None), hashes(salt_after(9, "r")), hashes(salt_after(9, "b"))
    assert red[:2] == blue[:2] == plain[:2], "vLLM hashes blocks before a salt's place otherwise"
    assert set(red[2:]).isdisjoint({*blue[2:], *plain[2:]})
    assert set(hashes("r")).isdisjoint({*red, *plain})
    assert red == hashes(salt_after(11, "r")) != hashes(salt_after(12, "r"))


def test_blocks_with_a_part_of_an_image_have_its_key_and_its_place(vllm: Any) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
    from vllm.v1.request import Request

    key = PromptMedia(2, 5, b"digest", b"data").key("s")
    place = PlaceholderRange(offset=2, length=5)
    image = MultiModalFeatureSpec(data=None, modality="image", identifier=key, mm_position=place)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(12)),
        sampling_params=SamplingParams(),
        pooling_params=None,
        mm_features=[image],
        cache_salt="s",
    )
    keys = [generate_block_hash_extra_keys(request, at, at + 4, 0)[0] for at in (0, 4, 8)]
    assert to_event_extra_keys(keys) == [((key, 2), "s"), ((key, -2),), None], (
        "vLLM tells images otherwise; see block_marks.py and the scheduler of tiers"
    )
    assert list(request.mm_features) == [image]


def test_block_keys_are_64_bits_in_the_events(vllm: Any) -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    key = maybe_convert_block_hash(bytes(range(32)))
    assert isinstance(key, int), "vLLM no longer cuts block hashes to integers by default"
    assert key < 1 << 64


def test_every_rank_has_endpoints_where_we_listen(vllm: Any) -> None:
    publisher = vllm.ZmqEventPublisher
    endpoints = EventEndpoints(Path("/run/x"))
    for rank in (0, 1, 7):
        offset = partial(publisher.offset_endpoint_port, data_parallel_rank=rank)
        assert (offset(endpoints.events), offset(endpoints.replay)) == endpoints.of_rank(rank), (
            "vLLM names the endpoints of data-parallel ranks otherwise; see arguments.py:EventEndpoints"
        )
    assert publisher._is_bind_endpoint(endpoints.of_rank(1)[0]), "vLLM would connect where nobody binds"


def test_the_publisher_of_a_rank_is_told_its_number(vllm: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.__init__)
    assert "self.parallel_config.data_parallel_index" in source, "ranks may publish at one endpoint"


def test_events_are_published_before_the_outputs_of_their_step_are_made(vllm: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.update_from_output)
    assert source.index("kv_event_publisher.publish") < source.index("engine_core_outputs = {"), (
        "a step's deltas may be delivered long before its blocks are known"
    )


def test_a_cache_can_be_emptied_under_load_and_says_so(vllm: Any) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "reset_running_requests" in inspect.signature(AsyncLLM.reset_prefix_cache).parameters
    assert "AllBlocksCleared()" in inspect.getsource(BlockPool.reset_prefix_cache)


def test_vllm_knows_every_argument_of_its_publisher_that_we_set(vllm: Any) -> None:
    from vllm.config import KVEventsConfig

    deployment = Deployment()
    events = EventEndpoints(Path("/run/x"))
    made = engine_arguments(deployment, deployment.pools[0], model_path="/m", platform="cpu", events=events)[
        "kv_events_config"
    ]
    config = KVEventsConfig(**made)
    assert dataclasses.asdict(config).items() >= made.items()


# -- vLLM's own publisher, and what is lost on the way ------------------------------------------------


@contextmanager
def _deaf(events: Any, rank: int = 0) -> Iterator[None]:
    """Nothing that is published meanwhile is heard, and silence asks for nothing: a slow machine's requests
    would leave time to get everything from the ring before it overflows."""
    sockets = events._ranks[rank]
    endpoint = sockets._live.getsockopt_string(zmq.LAST_ENDPOINT)
    sockets._quiet.cancel()
    sockets._live.disconnect(endpoint)
    yield
    sockets._live.connect(endpoint)
    # The clock of silence begins again.
    sockets._heard = True
    sockets._probe_when_quiet()


class Published:
    """A publisher of vLLM's, and our end."""

    def __init__(self, vllm: Any, directory: Path, *, ring: int = 100, rank: int = 0) -> None:
        self._vllm = vllm
        endpoints = EventEndpoints(directory)
        self.holdings = Holdings(rank + 1, lambda salt, adapter: root_hash("m", salt, adapter))
        self.holdings.begin(1, incomplete="begins")
        self.changed = asyncio.Event()
        self.holdings.subscribe(lambda batch: self.changed.set())
        self.publisher = vllm.ZmqEventPublisher(
            rank, endpoints.events, endpoints.replay, buffer_steps=ring, hwm=1000
        )
        self.events = KvEvents(self.holdings, endpoints, rank + 1)
        self.rank = rank
        self._doubt_only(rank)

    def _doubt_only(self, rank: int) -> None:
        # The other ranks of this engine do not exist.
        self.events._doubtful = {rank}

    def clear(self) -> None:
        self._publish(self._vllm.AllBlocksCleared())

    def store(self, key: int) -> None:
        self._publish(
            self._vllm.BlockStored(
                block_hashes=[key],
                parent_block_hash=None,
                token_ids=[key, key],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
        )

    def _publish(self, event: Any) -> None:
        self.publisher.publish(self._vllm.KVEventBatch(ts=0.0, events=[event]))

    async def store_unheard(self, keys: range) -> None:
        """Publish while nobody is connected."""
        before = self.publisher._buffer[-1][0]
        with _deaf(self.events, self.rank):
            for key in keys:
                self.store(key)
            async with asyncio.timeout(20):
                while self.publisher._buffer[-1][0] < before + len(keys):
                    await asyncio.sleep(0.01)
            assert self.holdings.held(self.rank) < len(keys) // 2

    async def held(self, blocks: int) -> None:
        async with asyncio.timeout(20):
            while self.holdings.held(self.rank) != blocks:
                self.changed.clear()
                await asyncio.wait((asyncio.ensure_future(self.changed.wait()),), timeout=0.05)

    async def exact(self) -> None:
        assert await self.events.exact_within(20)


@pytest.fixture
async def publish(vllm: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Published]]:
    made: list[Published] = []

    def make(**changes: Any) -> Published:
        made.append(Published(vllm, tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.events.close()
        await asyncio.to_thread(each.publisher.shutdown)


async def test_whoever_joins_late_has_everything_that_is_still_kept(publish: Any) -> None:
    # Published before a connection is there, and followed by silence.
    bench = publish()
    bench.clear()
    for key in range(1, 51):
        bench.store(key)
    await bench.held(50)
    await bench.exact()
    assert bench.holdings.incomplete is None


async def test_the_second_rank_is_heard_at_an_endpoint_of_its_own(publish: Any) -> None:
    bench = publish(rank=1)
    bench.clear()
    bench.store(1)
    await bench.held(1)


async def test_events_missed_while_disconnected_are_asked_for(publish: Any) -> None:
    bench = publish()
    bench.clear()
    bench.store(1)
    await bench.held(1)
    await bench.store_unheard(range(2, 40))
    # Nothing more is published: the silence is what is asked about.
    await bench.held(39)
    assert bench.holdings.incomplete is None


async def test_a_ring_that_has_overflowed_makes_the_record_incomplete_until_the_cache_is_cleared(
    publish: Any,
) -> None:
    bench = publish(ring=5)
    bench.clear()
    bench.store(1)
    await bench.held(1)
    await bench.exact()
    epoch = bench.holdings.epoch
    await bench.store_unheard(range(2, 40))
    async with asyncio.timeout(20):
        await bench.events.lost.wait()
    assert "are lost" in (bench.holdings.incomplete or "")
    assert bench.holdings.epoch == epoch + 1
    bench.clear()
    bench.store(100)
    await bench.exact()
    await bench.held(1)
    assert bench.holdings.incomplete is None
    assert bench.holdings.epoch == epoch + 1


# -- a real engine ---------------------------------------------------------------------------------


class Watched:
    """An engine, and a router's view of what it says."""

    def __init__(self, bench: EngineBench, follower: KvFollower) -> None:
        self.bench = bench
        self.follower = follower

    def request(self, tokens: list[int], rank: int, salt: str, adapter: str | None) -> EngineRequest:
        ranks = self.bench.identity.data_parallel_size
        return EngineRequest(
            self.bench.new_id(),
            token_ids(tokens),
            GREEDY,
            salt=salt,
            adapter=adapter,
            data_parallel_rank=rank if ranks > 1 else None,
        )

    async def ask(
        self, tokens: list[int], rank: int = 0, salt: str = "", adapter: str | None = None
    ) -> tuple[int, int, list[int]]:
        """The hit that was foreseen, the one that the engine reports, and the whole context."""
        predicted = self.follower.hit(tokens, rank, salt, adapter)
        (done,) = await self.bench.run(self.request(tokens, rank, salt, adapter))
        context = tokens + done.choice().tokens
        whole = (len(context) - 1) // BLOCK
        await self.follower.until(
            lambda: (
                self.follower.blocks(context[:-1], rank, salt, adapter) == whole or not self.follower.exact
            )
        )
        return predicted, _cached(done), context


def _cached(done: Recorded) -> int:
    assert done.last is not None
    assert done.last.usage is not None, done.last.error_message
    return done.last.usage.cached_tokens


def spec_of(tenancy: TenancySpec | None = None, *, variant: str = "", ranks: int = 1) -> WantedEngine:
    """An engine with about 60 blocks of KV for each rank."""
    engine = EngineSpec(
        block_size=BLOCK,
        kv_cache_bytes=8 << 20,
        max_num_batched_tokens=128,
        threads=1,
        data_parallel_size=ranks,
    )
    deployment = Deployment(
        model=ModelSpec(dtype="float32", max_model_len=512),
        disaggregation="never",
        lora=(LoraSpec(name="ad", path=f"{resolve_model('kvasir-tiny')}-lora"),),
        pools=(PoolSpec(name="both", role=Role.BOTH, engine=engine),),
        tenancy=TenancySpec() if tenancy is None else tenancy,
    )
    return WantedEngine(deployment, "both", "both-0", epoch=100, variant=variant)


async def watch(bench: EngineBench) -> Watched:
    """Follow an engine that nothing was asked of."""
    assert bench.engine.kv is not None
    follower = KvFollower(bench.identity, bench.engine.kv)
    await follower.catch_up()
    assert follower.held() == 0
    return Watched(bench, follower)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_ranks(engines: EngineRegistry) -> AsyncIterator[Watched]:
    """An engine of two ranks, whose ring of events overflows soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "EVENT_BACKLOG", RING)
        yield await watch(*await engines.running(spec_of(variant="forgetful", ranks=2)))


@pytest.mark.asyncio(loop_scope="session")
async def test_every_hit_of_salted_and_adapted_prompts_on_two_ranks_is_foreseen(two_ranks: Watched) -> None:
    watched, rng = two_ranks, random.Random(7)
    prompts = FreshPrompts(rng)
    identity = watched.bench.identity
    assert (identity.data_parallel_size, identity.reports_kv) == (2, True)
    assert identity.kv_blocks == watched.bench.engine.load().kv_blocks_total // 2
    assert 1e6 < identity.model_parameters / 2 < 2e6
    assert identity.model_bytes == 4 * identity.model_parameters
    assert identity.hardware.devices == 2
    seen: list[tuple[list[int], int, str, str | None]] = []
    hits = 0
    for _ in range(80):
        rank, salt, adapter = rng.randrange(2), rng.choice(["", "s"]), rng.choice([None, "ad"])
        prompt: list[int] = []
        if seen and rng.random() < 0.7:
            head, rank, salt, adapter = rng.choice(seen[-6:])
            prompt = head[: rng.randrange(1, len(head))]
        prompt = (prompt + prompts.fresh(rng.randrange(1, 120)))[:400]
        predicted, cached, context = await watched.ask(prompt, rank, salt, adapter)
        assert cached == predicted
        hits += cached > 0
        seen.append((context, rank, salt, adapter))
    # Some were found, and there was not room for all of them.
    assert hits > 15
    evicted = sum(len(context) // BLOCK for context, *_ in seen) > 3 * identity.kv_blocks
    assert evicted
    assert max(watched.follower.held(0), watched.follower.held(1)) < identity.kv_blocks


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="session")
async def test_tenants_share_exactly_the_blocks_of_a_declared_prefix(engines: EngineRegistry) -> None:
    declared = TenancySpec(shared_prefixes=(SharedPrefixSpec(name="help", text="x"),))
    prompts = FreshPrompts(random.Random(5))
    async with engines.alone(spec_of(declared)) as (bench,):
        watched = await watch(bench)
        prefix, rest = prompts.fresh(3 * BLOCK + 7), prompts.fresh(2 * BLOCK)
        prompt = [*prefix, *rest]
        found = []
        for salt, adapter in (
            ("red", None), ("blue", None), ("red", None), ("blue", "ad"), ("red", "ad"), ("green", None)
        ):  # fmt: skip
            predicted, cached, _ = await watched.ask(prompt, 0, salt_after(len(prefix), salt), adapter)
            assert cached == predicted
            found.append(cached // BLOCK)
        assert found == [0, 3, 5, 0, 3, 3]
        for salt in ("", "red", salt_after(len(prefix), "black")):
            # Without the prefix's place, or with another rest of the prompt, nothing of a tenant's is found.
            other = [*prefix, *prompts.fresh(2 * BLOCK)]
            predicted, cached, _ = await watched.ask(other, 0, salt)
            assert cached == predicted <= 3 * BLOCK
        assert (await watched.ask(prompt, 0, ""))[1] == 3 * BLOCK


@pytest.mark.asyncio(loop_scope="session")
async def test_side_by_side_prompts_and_stopped_ones_leave_the_record_exact(two_ranks: Watched) -> None:
    watched, prompts = two_ranks, FreshPrompts(random.Random(3))
    bench = watched.bench
    for _ in range(6):
        head = prompts.fresh(130)
        requests = [watched.request(head + prompts.fresh(20 * n + 1), 0, "", None) for n in range(6)]
        requests.append(watched.request(requests[0].tokens.tolist(), 0, "", None))
        bench.engine.submit(requests)
        await bench.first_delta(requests[2].request_id)
        bench.engine.abort([requests[2].request_id, requests[4].request_id])
        for request in requests:
            await bench.ended(request.request_id)
        # Whatever was stopped has no more to say once another request has been through.
        await watched.ask(prompts.fresh(40))
        for request in requests:
            predicted, cached, _ = await watched.ask(request.tokens.tolist())
            assert cached == predicted


async def _overflow(watched: Watched, prompts: FreshPrompts) -> None:
    """Have the engine publish more than its ring holds while nobody listens."""
    record: Any = watched.bench.engine
    with _deaf(record._record._events):
        for _ in range(RING + 16):
            await watched.bench.run(watched.request(prompts.fresh(100), 0, "", None))


@pytest.mark.asyncio(loop_scope="session")
async def test_a_lost_record_of_a_busy_engine_is_exact_again_and_no_stream_notices(
    two_ranks: Watched,
) -> None:
    watched, prompts = two_ranks, FreshPrompts(random.Random(5))
    prompt = prompts.fresh(200)
    (quiet,) = await watched.bench.run(watched.request(prompt, 0, "", None))
    await _overflow(watched, prompts)
    stop = False

    async def traffic() -> list[Recorded]:
        done: list[Recorded] = []
        while not stop:
            done += await watched.bench.run(
                *(watched.request(prompt, 0, "", None) for _ in range(3)),
            )
        return done

    streams = [asyncio.ensure_future(traffic()) for _ in range(2)]
    await watched.follower.until(lambda: not watched.follower.exact)
    await watched.follower.catch_up()
    stop = True
    for stream in streams:
        for done in await stream:
            assert done.choice().tokens == quiet.choice().tokens
    # One by one, so that what the last streams stored is heard before it is compared.
    await watched.ask(prompts.fresh(40))
    for _ in range(5):
        head = prompts.fresh(100)
        predicted, cached, context = await watched.ask(head)
        assert cached == predicted == 0
        predicted, cached, _ = await watched.ask(context)
        assert cached == predicted > 0
    predicted, cached, _ = await watched.ask(prompt)
    assert cached == predicted
    assert watched.follower.exact


@pytest.mark.asyncio(loop_scope="session")
async def test_a_lost_record_of_an_idle_engine_is_exact_again_at_once(two_ranks: Watched) -> None:
    watched, prompts = two_ranks, FreshPrompts(random.Random(6))
    epoch = watched.bench.engine.kv.epoch  # type: ignore[union-attr]  # it is our own record
    await _overflow(watched, prompts)
    await watched.bench.run(watched.request(prompts.fresh(40), 0, "", None))
    await watched.follower.until(lambda: not watched.follower.exact)
    await watched.follower.catch_up()
    assert watched.bench.engine.kv.epoch == epoch + 1  # type: ignore[union-attr]  # it is our own record
    for _ in range(3):
        predicted, cached, context = await watched.ask(prompts.fresh(100))
        assert cached == predicted == 0
        predicted, cached, _ = await watched.ask(context)
        assert cached == predicted > 0
