"""The logs of pods, as the API server has them, and what to run where they may not be read."""

from __future__ import annotations

import pytest
from tests.kit.cluster.api_server import ApiServer, Fault
from tests.kit.cluster.slices import Pod, endpoint_slice

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.pod_logs import PodLogQuery, pod_log
from kvasir_platform.cluster.kubernetes.slices import slices_of


async def lines(access: Access, query: PodLogQuery) -> list[str]:
    return [line async for line in pod_log(access, query, "router-0")]


async def test_the_pod_of_a_worker_is_in_its_name(server: ApiServer, access: Access) -> None:
    server.logs["decode-7f"] = b"one\ntwo\nno end"
    query = PodLogQuery("decode-7f@10.0.0.1:6000", follow=True, since_s=89.5, lines=10)
    assert await lines(access, query) == ["one", "two", "no end"]
    asked = server.asked[-1]
    assert (asked.resource, asked.name) == ("pods/log", "decode-7f")
    assert asked.query == {
        "follow": "true", "sinceSeconds": "90", "tailLines": "10", "container": "worker",
    }  # fmt: skip


async def test_a_pool_is_one_of_its_pods_and_the_router_the_pod_that_asks(
    server: ApiServer, access: Access
) -> None:
    server.put(
        slices_of("default"), endpoint_slice("decode", [Pod("d-1", "10.0.0.1"), Pod("d-2", "10.0.0.2")])
    )
    server.logs = {"d-2": b"newest\n", "router-0": b"mine\n"}
    assert await lines(access, PodLogQuery("decode")) == ["newest"]
    assert await lines(access, PodLogQuery("router")) == ["mine"]
    assert server.asked[-1].query["container"] == "router"
    with pytest.raises(ConfigError, match="no pool 'other' has pods in default"):
        await lines(access, PodLogQuery("other"))


async def test_where_logs_may_not_be_read_the_command_to_run_is_named(
    server: ApiServer, access: Access
) -> None:
    server.faults.append(Fault("get", status=403))
    with pytest.raises(UpstreamError, match=r"kubectl logs -n default decode-7f -c worker -f$"):
        await lines(access, PodLogQuery("decode-7f@10.0.0.1:6000", follow=True))
