"""A worker in a pod binds and advertises the pod's own address, which the spec calls `pod`."""

from __future__ import annotations

import pytest

from kvasir.config.spec.deployment import Deployment, TransferSpec, WorkerSpec
from kvasir.core.errors import ConfigError
from kvasir.core.membership import host_port
from kvasir_platform.apps.common.pod import at_pod, pod_ip

IN_POD = Deployment(worker=WorkerSpec(host="pod", port=7000), transfer=TransferSpec(host="pod"))


def test_pod_becomes_the_address_that_kubernetes_gave_it() -> None:
    found = at_pod(IN_POD, {"KVASIR_POD_IP": "10.1.2.3"})
    assert (found.worker.host, found.worker.port, found.transfer.host) == ("10.1.2.3", 7000, "10.1.2.3")


def test_other_addresses_stay_and_need_no_variable() -> None:
    assert at_pod(Deployment(), {}) is not None
    only = IN_POD.model_copy(update={"transfer": TransferSpec(host="192.0.2.1")})
    assert at_pod(only, {"KVASIR_POD_IP": "10.1.2.3"}).transfer.host == "192.0.2.1"


@pytest.mark.parametrize("told", ["", "pod-7", "10.1.2.3:80", "0.0.0.0", "::"])
def test_what_is_no_address_of_one_pod_is_refused_with_the_remedy(told: str) -> None:
    with pytest.raises(ConfigError, match=r"KVASIR_POD_IP.*status\.podIP"):
        at_pod(IN_POD, {"KVASIR_POD_IP": told})


def test_an_ipv6_address_stands_in_brackets_before_its_port() -> None:
    assert host_port(pod_ip({"KVASIR_POD_IP": "fd00:0::1"}), 7000) == "[fd00::1]:7000"
    assert host_port("10.1.2.3", 7000) == "10.1.2.3:7000"
