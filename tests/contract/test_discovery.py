"""Contract of Discovery adapters. Add an adapter with a `Source` and a line in `SOURCES`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import pytest_asyncio
from tests.kit.cluster.api_server import SLICES, ApiServer, start_server
from tests.kit.cluster.slices import Pod, endpoint_slice

from kvasir.clock import MonotonicClock
from kvasir.config.spec.cluster import KubernetesDiscoverySpec
from kvasir.core.errors import ConfigError
from kvasir.core.membership import Endpoint, MemberRecord, MembershipSnapshot, member_key
from kvasir.ports.discovery import Discovery
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiServer as KubernetesApi
from kvasir_platform.cluster.kubernetes.discovery import KubernetesDiscovery
from kvasir_platform.sim.net.discovery import FeedDiscovery
from kvasir_router.sessions.shared_discovery import SharedDiscovery
from kvasir_router.sessions.static_discovery import StaticDiscovery

PATIENCE_S = 20.0


class Source(Protocol):
    """An adapter under test, with two members behind it at first."""

    @property
    def discovery(self) -> Discovery: ...

    async def change(self) -> bool:
        """Replace the members by one other. False: this source cannot change."""
        ...


class StaticSource:
    def __init__(self) -> None:
        self.discovery = StaticDiscovery(["prefill=127.0.0.1:7001", "decode=127.0.0.1:7002"])

    async def change(self) -> bool:
        return False


class FeedSource:
    def __init__(self) -> None:
        self.discovery = FeedDiscovery()

    async def begin(self) -> None:
        await self.discovery.put(Endpoint("a", "a:1", "prefill"), Endpoint("b", "b:1", "decode"))

    async def change(self) -> bool:
        await self.discovery.put(Endpoint("c", "c:1", "decode"))
        return True


class SharedSource:
    """One model's part of what another source names, among workers of other models."""

    def __init__(self) -> None:
        self._feed = FeedSource()
        shared = SharedDiscovery(self._feed.discovery)
        self.discovery = shared.part(["prefill", "decode"])
        self.running = asyncio.ensure_future(shared.run())

    async def begin(self) -> None:
        await self._feed.discovery.put(
            Endpoint("a", "a:1", "prefill"), Endpoint("b", "b:1", "decode"), Endpoint("x", "x:1", "another")
        )

    async def change(self) -> bool:
        await self._feed.discovery.put(Endpoint("x", "x:1", "another"), Endpoint("c", "c:1", "decode"))
        return True


class PolledClock(MonotonicClock):
    """A clock that polls often, and lets a test wait for whole polls."""

    def __init__(self) -> None:
        self._polls = 0
        self._polled = asyncio.Condition()

    async def sleep(self, seconds: float) -> None:
        async with self._polled:
            self._polls += 1
            self._polled.notify_all()
        await super().sleep(min(seconds, 0.02))

    async def polls(self, count: int) -> None:
        """Wait until `count` more readings have been made."""
        async with asyncio.timeout(PATIENCE_S), self._polled:
            enough = self._polls + count
            await self._polled.wait_for(lambda: self._polls >= enough)


class RaySource:
    """Records in the key-value store of a real Ray head, under a deployment of their own."""

    _numbers = itertools.count()

    def __init__(self, address: str) -> None:
        # Imported here: Ray takes a second, and only slow tests need it.
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

        from kvasir.core.membership import NAMESPACE
        from kvasir_platform.cluster.ray.discovery import RayDiscovery

        self._deployment = f"contract-{next(self._numbers)}"
        self._gcs = GcsClient(address=address)
        self._namespace = NAMESPACE
        self.clock = PolledClock()
        self.discovery = RayDiscovery(address, self._deployment, self.clock)

    def put(self, worker_id: str, pool: str, beat: int = 0) -> None:
        self.put_raw(worker_id, MemberRecord(worker_id, f"{worker_id}:1", pool, pid=1, beat=beat).encode())

    def put_raw(self, worker_id: str, value: bytes) -> None:
        key = member_key(self._deployment, worker_id).encode()
        self._gcs.internal_kv_put(key, value, True, self._namespace, PATIENCE_S)

    def remove(self, worker_id: str) -> None:
        key = member_key(self._deployment, worker_id).encode()
        self._gcs.internal_kv_del(key, False, self._namespace, PATIENCE_S)

    async def change(self) -> bool:
        self.put("c", "decode")
        self.remove("a")
        self.remove("b")
        return True


async def static(_: pytest.FixtureRequest) -> Source:
    return StaticSource()


async def feed(_: pytest.FixtureRequest) -> Source:
    source = FeedSource()
    await source.begin()
    return source


async def shared(request: pytest.FixtureRequest) -> Source:
    source = SharedSource()
    request.addfinalizer(source.running.cancel)
    await source.begin()
    return source


async def kubernetes(request: pytest.FixtureRequest) -> Source:
    folder: Path = request.getfixturevalue("tmp_path")
    server = await start_server(folder)
    request.addfinalizer(server.stop)
    return KubernetesSource(server, folder)


async def ray(request: pytest.FixtureRequest) -> Source:
    source = RaySource(request.getfixturevalue("ray_address"))
    source.put("a", "prefill")
    source.put("b", "decode")
    return source


@contextmanager
def allowed_to(token: str) -> Iterator[None]:
    """This process may talk to the Ray of `token`: Ray reads the environment when it is first imported."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    from kvasir_platform.cluster.ray.head import ray_environment

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ray_environment(token).items():
                patch.setenv(name, value)
            reset_auth_token_state()
            yield
    finally:
        reset_auth_token_state()


@contextmanager
def ray_head() -> Iterator[Any]:
    """A private head that this process is allowed to talk to."""
    from kvasir_platform.cluster.ray.head import RayHead

    token = "c0ffee" * 10
    with allowed_to(token), tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        home = Path(folder)
        head = RayHead.start(temp_dir=home / "ray", token=token, cpus=1, gpus=0, log=home / "log")
        try:
            yield head
        finally:
            head.stop()


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with ray_head() as head:
        yield head.address


class KubernetesSource:
    """EndpointSlices behind an API server."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self._put("prefill", "a")
        self._put("decode", "b")
        access = Access(server.host, server.port, server.write_credentials(folder / "account"))
        self.discovery = KubernetesDiscovery(
            KubernetesApi(access, timeout_s=PATIENCE_S),
            "default",
            "kvasir",
            ["prefill", "decode"],
            KubernetesDiscoverySpec(),
            clock=MonotonicClock(),
            rng=random.Random(1),
        )

    def _put(self, pool: str, name: str, *, terminating: bool = False) -> None:
        pod = Pod(name, f"10.0.0.{ord(name)}", terminating=terminating)
        self._server.put(SLICES, endpoint_slice(pool, [pod]))

    async def change(self) -> bool:
        self._put("prefill", "a", terminating=True)
        self._put("decode", "c")
        return True


SourceFactory = Callable[[pytest.FixtureRequest], Awaitable[Source]]
SOURCES: dict[str, SourceFactory] = {
    "static": static,
    "feed": feed,
    "shared": shared,
    "kubernetes": kubernetes,
    "ray": ray,
}


@pytest_asyncio.fixture(
    params=["static", "feed", "shared", "kubernetes", pytest.param("ray", marks=pytest.mark.slow)]
)
async def source(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    made = await SOURCES[request.param](request)
    yield made
    await made.discovery.close()


async def following(watch: AsyncIterator[MembershipSnapshot]) -> MembershipSnapshot:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(watch)


async def test_the_current_snapshot_comes_at_once(source: Source) -> None:
    members = await following(source.discovery.watch())
    assert {endpoint.pool for endpoint in members.endpoints} == {"prefill", "decode"}
    assert len({endpoint.worker_id for endpoint in members.endpoints}) == 2
    assert all(endpoint.address for endpoint in members.endpoints)


async def test_two_watches_see_the_same(source: Source) -> None:
    one, other = source.discovery.watch(), source.discovery.watch()
    assert (await following(one)).endpoints == (await following(other)).endpoints


async def test_a_change_comes_as_a_whole_snapshot_of_a_higher_revision(source: Source) -> None:
    watch = source.discovery.watch()
    before = await following(watch)
    if not await source.change():
        pytest.skip("this source never changes")
    after = await following(watch)
    assert after.revision > before.revision
    assert len(after.endpoints) == 1


async def test_nothing_comes_while_nothing_changes(source: Source) -> None:
    watch = source.discovery.watch()
    await following(watch)
    waiting = asyncio.ensure_future(anext(watch))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_closing_ends_watches_and_may_be_repeated(source: Source) -> None:
    watch = source.discovery.watch()
    await following(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.wait({waiting}, timeout=0.01)
    await source.discovery.close()
    await source.discovery.close()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(PATIENCE_S):
            await waiting


async def test_a_part_hears_nothing_of_the_pools_of_others() -> None:
    feed = FeedDiscovery()
    shared = SharedDiscovery(feed)
    part = shared.part(["decode"])
    running = asyncio.ensure_future(shared.run())
    watch = part.watch()
    await feed.put(Endpoint("x", "x:1", "another"))
    assert (await following(watch)).endpoints == frozenset()
    await feed.put(Endpoint("x", "x:1", "another"), Endpoint("y", "y:1", "another"))
    await feed.put(Endpoint("y", "y:1", "another"), Endpoint("b", "b:1", "decode"))
    assert {each.worker_id for each in (await following(watch)).endpoints} == {"b"}
    await feed.close()
    await running


@pytest.mark.slow
async def test_what_is_no_member_record_in_rays_store_is_ignored(ray_address: str) -> None:
    source = RaySource(ray_address)
    for name, garbage in {"x": b"", "y": b"\xff\x00", "z": b'{"worker_id": 1}', "0": b"[]"}.items():
        source.put_raw(name, garbage)
    source.put("a", "decode")
    watch = source.discovery.watch()
    assert (await following(watch)).endpoints == {Endpoint("a", "a:1", "decode")}
    source.put_raw("a", b"broken")
    assert (await following(watch)).endpoints == frozenset()
    source.put("a", "decode", beat=1)
    assert {endpoint.worker_id for endpoint in (await following(watch)).endpoints} == {"a"}
    await source.discovery.close()


@pytest.mark.slow
async def test_a_ray_head_that_goes_away_takes_no_member_with_it() -> None:
    with ray_head() as head:
        source = RaySource(head.address)
        source.put("a", "prefill")
        watch = source.discovery.watch()
        assert len((await following(watch)).endpoints) == 1
        waiting = asyncio.ensure_future(anext(watch))
        await source.clock.polls(1)
        head.stop()
        await source.clock.polls(3)
        assert not waiting.done()
        await source.discovery.close()
        with pytest.raises(StopAsyncIteration):
            async with asyncio.timeout(PATIENCE_S):
                await waiting


@pytest.mark.parametrize("text", ["", "decode", "decode=", "=h:1", "decode=h", "decode=h:x", "decode=:1"])
def test_a_static_endpoint_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pool=host:port"):
        StaticDiscovery([text])


@pytest.mark.slow
def test_a_private_head_listens_on_the_loopback_interface_only(ray_address: str) -> None:
    port = int(ray_address.rpartition(":")[2])
    bound: dict[str, dict[int, str]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    head = process.environ().get("KVASIR_RAY_HEAD", "")
                    bound.setdefault(head, {})[each.laddr.port] = each.laddr.ip
    (found,) = [addresses for addresses in bound.values() if port in addresses]
    assert len(found) >= 3, "the GCS, the raylet and its object manager"
    assert all(ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in found.values()), found
