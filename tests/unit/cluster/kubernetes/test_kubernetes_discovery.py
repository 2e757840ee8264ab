"""Membership through Kubernetes is as current as the API server, whose failures remove no member."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.cluster import api_server as helper
from tests.kit.cluster.api_server import SLICES, Fault
from tests.kit.cluster.slices import Pod, endpoint_slice
from tests.kit.gateway.api_requests import Rule
from tests.kit.skipping_clock import SkippingClock

from kvasir.config.spec.cluster import KubernetesDiscoverySpec
from kvasir.core.membership import STALE_S, MembershipSnapshot
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import GONE, ApiServer, Listing
from kvasir_platform.cluster.kubernetes.discovery import KubernetesDiscovery
from kvasir_platform.cluster.kubernetes.reflector import BACKOFF_MAX_S, BACKOFF_MIN_S

PATIENCE_S = 20.0


class Following:
    """A discovery under watch. `seen` are the names of the members' pods, snapshot by snapshot."""

    def __init__(self, discovery: KubernetesDiscovery, clock: SkippingClock) -> None:
        self.clock = clock
        self.discovery = discovery
        self.seen: list[set[str]] = []
        self._came = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def until(self, members: str) -> None:
        """Wait for a snapshot of just these pods."""
        await self.until_true(lambda: bool(self.seen) and self.seen[-1] == set(members.split()))

    async def until_true(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._came.clear()
                await self._came.wait()

    async def close(self) -> None:
        await self.discovery.close()
        await self._task

    async def _follow(self) -> None:
        revision = 0
        async for members in self.discovery.watch():
            assert members.revision > revision
            revision = members.revision
            self.seen.append(names(members))
            self._came.set()


def names(members: MembershipSnapshot) -> set[str]:
    return {endpoint.worker_id.partition("@")[0] for endpoint in members.endpoints}


def put(server: helper.ApiServer, pool: str, pods: str, *, silently: bool = False) -> None:
    """The slice of a pool; a pod with a minus is being deleted."""
    made = [Pod(pod.strip("-"), f"10.0.0.{ord(pod[0])}", terminating="-" in pod) for pod in pods.split()]
    server.put(SLICES, endpoint_slice(pool, made), silently=silently)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[helper.ApiServer]:
    async with helper.api_server(tmp_path) as made:
        made.write_credentials(tmp_path / "account")
        put(made, "prefill", "p")
        put(made, "decode", "a b")
        yield made


@pytest_asyncio.fixture
async def following(server: helper.ApiServer, tmp_path: Path) -> AsyncIterator[Following]:
    clock = SkippingClock()
    access = Access.in_cluster(tmp_path / "account", server.environment())
    discovery = KubernetesDiscovery(
        ApiServer(access, timeout_s=5.0),
        "default",
        "kvasir",
        ["prefill", "decode"],
        KubernetesDiscoverySpec(),
        clock=clock,
        rng=random.Random(7),
    )
    made = Following(discovery, clock)
    await made.until("p a b")
    await seen_by(server, "watch")
    yield made
    await made.close()


async def seen_by(server: helper.ApiServer, verb: str, count: int = 1) -> None:
    """Wait for that many requests of a verb, in all."""
    async with asyncio.timeout(PATIENCE_S):
        await server.until(lambda: server.verbs().count(verb) >= count)


async def test_each_change_of_a_slice_is_told(server: helper.ApiServer, following: Following) -> None:
    put(server, "decode", "a b c")
    await following.until("p a b c")
    put(server, "decode", "b c")
    await following.until("p b c")
    server.put(SLICES, endpoint_slice("decode", [Pod("d", "10.0.1.1")], name="another"))
    await following.until("p b c d")
    server.delete(SLICES, "another")
    await following.until("p b c")
    assert server.verbs() == ["list", "watch"]


async def test_a_pod_that_is_being_deleted_leaves_the_members_before_it_has_gone(
    server: helper.ApiServer, following: Following
) -> None:
    put(server, "decode", "-a -b")
    await following.until("p")
    assert following.seen == [{"p", "a", "b"}, {"p"}]
    assert following.clock.slept == []


async def test_slices_of_other_deployments_and_unknown_pools_are_not_even_sent(
    server: helper.ApiServer, following: Following
) -> None:
    server.put(SLICES, endpoint_slice("decode", [Pod("x", "10.0.1.1")], deployment="other"))
    server.put(SLICES, endpoint_slice("retired", [Pod("y", "10.0.1.2")]))
    put(server, "decode", "a b c")
    await following.until("p a b c")
    assert following.seen == [{"p", "a", "b"}, {"p", "a", "b", "c"}]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("watch", status=GONE),
        Fault("watch", gone=True),
        Fault("watch", gone=True, times=4),
        Fault("watch", status=429, retry_after=3),
        Fault("watch", status=500, times=3),
        Fault("watch", status=403, times=3),
        Fault("watch", status=401, times=3),
        Fault("watch", cut_after=0),
    ],
    ids=str,
)
async def test_whatever_a_watch_meets_no_member_is_lost_and_no_change_missed(
    server: helper.ApiServer, following: Following, fault: Fault
) -> None:
    fault = Fault(**{name: getattr(fault, name) for name in Fault.__slots__})
    server.faults.append(fault)
    watches = server.verbs().count("watch")
    server.cut()
    await seen_by(server, "watch", watches + 1)
    put(server, "decode", "a b c")
    await following.until("p a b c")
    put(server, "decode", "a b c d")
    await following.until("p a b c d")
    assert all(seen >= {"p", "a", "b"} for seen in following.seen)


async def test_lists_that_fail_in_whatever_way_take_no_member_and_are_tried_again(
    server: helper.ApiServer, following: Following
) -> None:
    faults = [Fault("list", status=status) for status in (500, 503, 429, 410, 401, 403)]
    server.faults += [*faults, Fault("watch", gone=True)]
    server.cut()
    await seen_by(server, "list", 2)
    put(server, "decode", "a b c")
    await following.until("p a b c")
    assert server.faults == []
    assert following.seen == [{"p", "a", "b"}, {"p", "a", "b", "c"}]


async def test_an_api_server_that_is_away_takes_no_member_with_it(
    server: helper.ApiServer, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.stop()
    async with asyncio.timeout(PATIENCE_S):
        await following.clock.until(20)
    assert following.seen == [{"p", "a", "b"}]
    waited_s = sum(following.clock.slept)
    assert waited_s <= following.discovery.stale_s() < waited_s + PATIENCE_S
    put(server, "decode", "c")
    await server.listen()
    await following.until("p c")
    assert following.discovery.stale_s() == 0.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "keeping the known objects" in told[0]
    assert "can be watched again" in told[1]


async def test_waits_between_tries_grow_with_jitter_to_a_bound(
    server: helper.ApiServer, following: Following
) -> None:
    server.stop()
    async with asyncio.timeout(PATIENCE_S):
        await following.clock.until(20)
    slept = following.clock.slept
    for number, waited in enumerate(slept):
        longest = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0**number)
        assert longest / 2 <= waited <= longest
    assert len(set(slept)) == len(slept)
    await server.listen()


async def test_a_server_that_asks_to_be_left_alone_is_left_alone(
    server: helper.ApiServer, following: Following
) -> None:
    server.faults.append(Fault("watch", status=429, retry_after=40))
    server.cut()
    await seen_by(server, "watch", 3)
    assert 40.0 in following.clock.slept


async def test_an_expired_version_is_listed_anew_at_once_and_then_ever_more_slowly(
    server: helper.ApiServer, following: Following
) -> None:
    server.faults.append(Fault("watch", gone=True, times=5))
    server.cut()
    await seen_by(server, "watch", 7)
    cut, *again = following.clock.slept
    assert cut <= BACKOFF_MIN_S
    assert len(again) == 5
    assert min(again) > 0.0


async def test_what_no_watch_told_is_found_by_the_next_list(
    server: helper.ApiServer, following: Following
) -> None:
    put(server, "decode", "a b c", silently=True)
    following.clock.skip(KubernetesDiscoverySpec().resync_s)
    server.cut()
    await following.until("p a b c")
    assert server.verbs().count("list") == 2


async def test_a_token_that_was_replaced_is_taken_up(
    server: helper.ApiServer, following: Following, tmp_path: Path
) -> None:
    server.tokens = {"token-2": "system:serviceaccount:default:router"}
    server.cut()
    async with asyncio.timeout(PATIENCE_S):
        await following.clock.until(3)
    assert following.seen == [{"p", "a", "b"}]
    server.write_credentials(tmp_path / "account", "token-2")
    put(server, "decode", "a b c")
    await following.until("p a b c")


async def test_listing_and_watching_slices_is_all_that_it_has_to_be_allowed(
    server: helper.ApiServer, following: Following
) -> None:
    rule = Rule(("discovery.k8s.io",), ("endpointslices",), ("list", "watch"))
    server.rules["system:serviceaccount:default:router"] = (rule,)
    following.clock.skip(KubernetesDiscoverySpec().resync_s)
    server.cut()
    await seen_by(server, "list", 2)
    put(server, "decode", "a b c")
    await following.until("p a b c")


async def test_a_pool_that_vanishes_and_comes_back_was_never_gone(
    server: helper.ApiServer, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.faults.append(Fault("list", status=503, times=3))
    server.delete(SLICES, "kvasir-decode-ipv4")
    await seen_by(server, "list", 2)
    put(server, "decode", "b c")
    await following.until("p b c")
    assert following.seen == [{"p", "a", "b"}, {"p", "b", "c"}]
    assert "pool decode has no worker in any slice" in caplog.text


async def test_a_pool_that_stays_away_is_believed_to_be_gone_after_a_while(
    server: helper.ApiServer, following: Following
) -> None:
    server.delete(SLICES, "kvasir-decode-ipv4")
    put(server, "prefill", "p q")
    await following.until("p q")
    assert following.clock.slept
    assert sum(following.clock.slept) == pytest.approx(STALE_S, abs=0.5)


async def test_the_others_are_followed_while_a_vanished_pool_is_doubted(
    server: helper.ApiServer, following: Following
) -> None:
    server.faults.append(Fault("list", status=503, times=1000))
    put(server, "prefill", "p q")
    server.delete(SLICES, "kvasir-decode-ipv4")
    await following.until("p q a b")
    assert server.verbs().count("watch") == 1


async def test_what_is_no_slice_is_ignored_and_told_once_for_each_change_of_it(
    server: helper.ApiServer, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server.put(SLICES, {**endpoint_slice("decode", [], name="odd"), "endpoints": 7})
    for pods in ("a b c", "a b c d"):
        put(server, "decode", pods)
        await following.until(f"p {pods}")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["ignoring the slice odd"]


async def test_watches_share_one_of_the_api_server_s(server: helper.ApiServer, following: Following) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert names(await anext(following.discovery.watch())) == {"p", "a", "b"}
    assert server.verbs() == ["list", "watch"]


async def test_a_fault_of_the_program_itself_is_not_kept_quiet() -> None:
    class Broken(ApiServer):
        async def list(self, *_: object) -> Listing:
            raise ZeroDivisionError

    discovery = KubernetesDiscovery(
        Broken(Access("h", 1, Path("/nowhere")), timeout_s=1.0),
        "default",
        "kvasir",
        ["decode"],
        KubernetesDiscoverySpec(),
        clock=SkippingClock(),
        rng=random.Random(1),
    )
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(PATIENCE_S):
            await anext(discovery.watch())
    await discovery.close()
