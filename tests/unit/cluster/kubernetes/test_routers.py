"""The routers behind a Service, as its EndpointSlices name them."""

from __future__ import annotations

import pytest
from tests.kit.cluster.api_server import ApiServer, Fault
from tests.kit.cluster.slices import Pod, endpoint_slice

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.routers import router_addresses
from kvasir_platform.cluster.kubernetes.slices import slices_of

SERVICE = "kvasir-router"
SLICES = slices_of("default")


async def test_every_ready_router_is_named_once_in_order(server: ApiServer, access: Access) -> None:
    pods = [Pod("b", "10.0.0.2"), Pod("a", "10.0.0.1"), Pod("c", "10.0.0.3", ready=False)]
    server.put(SLICES, endpoint_slice("router", pods, port=8000, port_name="http"))
    six = [Pod("b", "fd00::2"), Pod("six", "fd00::6")]
    server.put(SLICES, endpoint_slice("router", six, port=8000, port_name="http", family="IPv6"))
    server.put(SLICES, endpoint_slice("decode", [Pod("d", "10.0.0.9")]))
    assert await router_addresses(access, SERVICE) == ("10.0.0.1:8000", "10.0.0.2:8000", "[fd00::6]:8000")


async def test_a_service_without_routers_says_how_to_find_its_name(access: Access) -> None:
    with pytest.raises(ConfigError, match=r"no router is ready .* in default; `kubectl get services` lists"):
        await router_addresses(access, "other")


async def test_a_pod_that_may_not_list_says_where_to_run(server: ApiServer, access: Access) -> None:
    server.faults.append(Fault("list", status=403))
    with pytest.raises(UpstreamError, match="run this in a router's pod, whose Role allows it"):
        await router_addresses(access, SERVICE)
