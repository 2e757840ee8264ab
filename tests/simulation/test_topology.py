"""Workers in zones and racks, through sessions and the production router, in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest

from kvasir.config.spec.deployment import Deployment, PoolSpec, TopologySpec
from kvasir.core.locality import LinkClass
from kvasir.core.requests import Role, Sampling
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate, small_deployment

HERE = TopologySpec(zone="z1", rack="r1")
PLACES = {
    "rack": HERE,
    "zone": TopologySpec(zone="z1", rack="r2"),
    "elsewhere": TopologySpec(zone="z2", rack="r1"),
}
PROMPT = 640


def deployment(*decode: str, labelled: bool = True) -> Deployment:
    """A prefill worker, and a decode worker in each of these places."""
    base = small_deployment()
    engine = base.pools[0].engine
    nowhere = TopologySpec()
    pools = [
        PoolSpec(name="prefill", role=Role.PREFILL, engine=engine, topology=HERE if labelled else nowhere)
    ]
    for name in decode:
        topology = PLACES[name] if labelled else nowhere
        pools.append(PoolSpec(name=name, role=Role.DECODE, engine=engine, topology=topology))
    return base.model_copy(update={"pools": tuple(pools)})


def prompt(number: int) -> range:
    return range(number * PROMPT, (number + 1) * PROMPT)


async def decoded(cluster: Cluster, number: int) -> str:
    """Where one request alone is decoded."""
    summary = await cluster.submit(prompt(number)).finished()
    assert summary.outcome == "ok"
    return str(summary.decode_worker).rpartition("-")[0]


@pytest.mark.parametrize(
    ("places", "nearest"),
    [
        (("elsewhere", "zone", "rack"), "rack"),
        (("rack", "zone", "elsewhere"), "rack"),
        (("elsewhere", "zone"), "zone"),
        (("zone", "elsewhere"), "zone"),
    ],
)
def test_requests_one_after_another_are_decoded_at_the_nearest_worker(
    places: tuple[str, ...], nearest: str
) -> None:
    async def story(cluster: Cluster) -> None:
        assert {await decoded(cluster, number) for number in range(12)} == {nearest}

    simulate(deployment(*places), story)


def test_a_farther_worker_helps_when_the_nearest_is_busy() -> None:
    async def story(cluster: Cluster) -> None:
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        streams = [cluster.submit(prompt(number), sampling) for number in range(24)]
        for stream in streams:
            await stream.finished()
        used = Counter(str(each.decode_worker).rpartition("-")[0] for each in cluster.summaries)
        assert used["rack"] >= used["elsewhere"] > 0
        transfers = cluster.router.link_transfers()[cluster.deployment.model.name]
        assert {link: each.transfers for link, each in transfers.items()} == {
            LinkClass.RACK: used["rack"],
            LinkClass.CROSS_ZONE: used["elsewhere"],
        }
        assert sum(each.bytes for each in transfers.values()) == sum(
            each.usage.transferred_bytes for each in cluster.summaries
        )

    simulate(deployment("rack", "elsewhere"), story)


def test_without_labels_transfers_are_of_no_class() -> None:
    async def story(cluster: Cluster) -> None:
        for number in range(4):
            await decoded(cluster, number)
        (transfers,) = cluster.router.link_transfers().values()
        assert set(transfers) == {LinkClass.UNKNOWN}

    simulate(deployment("rack", "elsewhere", labelled=False), story)
