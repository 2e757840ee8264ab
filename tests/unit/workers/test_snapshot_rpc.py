"""Snapshots over real gRPC: complete, refused with the correct reason, and limited in number."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from kvasir.core.kv import KvSnapshotPart
from kvasir.core.requests import token_ids
from kvasir.native import root_hash
from kvasir.ports.engine import KvSource
from kvasir.ports.session import WorkerConnection
from kvasir.wire.codec import SERVICE, decode_snapshot_part, encode_snapshot_request
from kvasir_workers.server.grpc_server import GrpcServer, GrpcServerLimits
from kvasir_workers.server.holdings import Holdings
from kvasir_workers.server.kv_feed import KvFeed

TOKEN = "secret"
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)
Ask = Callable[..., "grpc.aio.UnaryStreamCall[bytes, bytes]"]


def record(blocks: int) -> Holdings:
    made = Holdings(1, lambda salt, adapter: root_hash("m", salt, adapter), part_blocks=64)
    made.begin(5)
    for key in range(0, blocks, 4):
        made.store(0, None, array("Q", range(key, key + 4)), token_ids(range(8 * key, 8 * key + 8)), 2)
    made.flush()
    return made


@asynccontextmanager
async def serving(source: KvSource | None, **limits: float) -> AsyncIterator[Ask]:
    """Yields how to call Snapshot."""

    async def nobody(connection: WorkerConnection) -> None:
        await connection.close()

    feed = KvFeed(source, lambda batch: None, max_snapshots=2)
    bounds = GrpcServerLimits(**limits)  # type: ignore[arg-type]  # bounds are numbers
    server = GrpcServer(nobody, bind="127.0.0.1:0", token=TOKEN, snapshot=feed.snapshot, limits=bounds)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_stream(
            f"/{SERVICE}/Snapshot", request_serializer=None, response_deserializer=None
        )

        def ask(
            request: bytes = encode_snapshot_request(0), metadata: tuple[tuple[str, str], ...] = AUTHORIZED
        ) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
            return method(request, metadata=metadata)

        yield ask
    await server.stop(0)


async def parts_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> list[KvSnapshotPart]:
    return [decode_snapshot_part(data) async for data in call]


async def refusal(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await parts_of(call)
    return caught.value.code(), caught.value.details() or ""


async def test_a_snapshot_arrives_whole_and_in_parts() -> None:
    source = record(1000)
    expected = [part async for part in source.snapshot()]
    async with serving(source) as ask:
        parts = await parts_of(ask())
        assert parts == expected
        assert len(parts) > 5
        assert [part.last for part in parts].index(True) == len(parts) - 1


async def test_whoever_lacks_the_token_gets_nothing() -> None:
    async with serving(record(4)) as ask:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            code, _ = await refusal(ask(metadata=metadata))
            assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_noise_is_an_invalid_argument() -> None:
    async with serving(record(4)) as ask:
        code, _ = await refusal(ask(b"\xff\xff"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engine_that_tells_nothing_is_unimplemented() -> None:
    async with serving(None) as ask:
        assert (await refusal(ask()))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_record_that_is_incomplete_is_unavailable_with_the_reason() -> None:
    source = record(4)
    source.lose("vLLM's KV events 3 to 9 are lost")
    async with serving(source) as ask:
        code, details = await refusal(ask())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "3 to 9" in details
        source.restore()
        assert (await parts_of(ask()))[-1].last


class Stalled(Holdings):
    """A record whose first part comes when it is let go."""

    def __init__(self) -> None:
        super().__init__(1, lambda salt, adapter: 0)
        self.go = asyncio.Event()
        self.begun = 0

    async def snapshot(self):  # type: ignore[no-untyped-def]  # as in Holdings
        self.begun += 1
        await self.go.wait()
        async for part in super().snapshot():
            yield part


async def test_more_than_allowed_at_once_are_exhausted_and_a_place_is_free_again_after_one_ends() -> None:
    source = Stalled()
    async with serving(source) as ask:
        running = [asyncio.ensure_future(parts_of(ask())) for _ in range(2)]
        async with asyncio.timeout(10):
            while source.begun < 2:
                await asyncio.sleep(0)
        assert (await refusal(ask()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        source.go.set()
        assert [len(await each) for each in running] == [1, 1]
        assert len(await parts_of(ask())) == 1


async def test_a_caller_that_leaves_gives_its_place_back() -> None:
    source = Stalled()
    async with serving(source) as ask:
        for expected in (1, 2, 3, 4):
            call = ask()
            reading = asyncio.ensure_future(call.read())
            async with asyncio.timeout(10):
                while source.begun < expected:
                    await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            # A refusal would have counted no beginning: the next round proves that there was a place.
        source.go.set()


async def test_a_snapshot_that_takes_too_long_is_cut_off() -> None:
    async with serving(Stalled(), snapshot_timeout_s=0.05) as ask:
        assert (await refusal(ask()))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
