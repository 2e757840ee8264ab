"""Which transfer a worker uses between machines, and which it refuses to use without tickets."""

from __future__ import annotations

import pytest

from kvasir.config.load.transfer_choice import (
    allows_tcp,
    chosen_kind,
    refused_transfer,
    with_transfer,
)
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.workers import NixlSpec, TransferSpec
from kvasir.core.errors import ConfigError

BEYOND = "10.0.0.7"
ACCEPTED = NixlSpec(unauthenticated_tcp=True)


@pytest.mark.parametrize(
    ("kind", "host", "rdma", "chosen"),
    [
        ("auto", "127.0.0.1", False, "nixl"),
        ("auto", "localhost", False, "nixl"),
        ("auto", "::1", True, "nixl"),
        ("auto", BEYOND, True, "nixl"),
        ("auto", BEYOND, False, "nccl"),
        ("auto", "pod", False, "nccl"),
        ("nccl", "127.0.0.1", True, "nccl"),
        ("nixl", BEYOND, False, "nixl"),
    ],
)
def test_nixl_is_chosen_where_it_opens_no_port_for_tcp(kind: str, host: str, rdma: bool, chosen: str) -> None:
    transfer = TransferSpec.model_validate({"kind": kind, "host": host})
    assert chosen_kind(transfer, rdma=rdma) == chosen


def test_nixl_without_rdma_devices_is_refused_between_machines_until_it_is_accepted() -> None:
    asked = TransferSpec(kind="nixl", host=BEYOND)
    reason = refused_transfer(asked, rdma=False)
    assert reason is not None
    assert "transfer.kind" in reason
    assert "nccl" in reason
    assert "transfer.nixl.unauthenticated_tcp: true" in reason
    assert refused_transfer(asked, rdma=True) is None
    assert refused_transfer(TransferSpec(kind="nixl"), rdma=False) is None
    assert refused_transfer(TransferSpec(host=BEYOND), rdma=False) is None
    accepted = TransferSpec(kind="nixl", host=BEYOND, nixl=ACCEPTED)
    assert refused_transfer(accepted, rdma=False) is None


@pytest.mark.parametrize("named", ["all", "tcp,self", "rc,cuda_copy,tcp", "^ib", "rc, tcp"])
def test_a_variable_that_lets_ucx_use_tcp_beside_rdma_is_refused_between_machines(named: str) -> None:
    assert allows_tcp(named)
    asked = TransferSpec(host=BEYOND)
    reason = refused_transfer(asked, rdma=True, ucx_tls=named)
    assert reason is not None
    assert reason.startswith(f"UCX_TLS is {named!r}")
    assert refused_transfer(TransferSpec(host=BEYOND, nixl=ACCEPTED), rdma=True, ucx_tls=named) is None
    assert refused_transfer(TransferSpec(), rdma=True, ucx_tls=named) is None


@pytest.mark.parametrize("named", ["rc,cuda_copy,sm,self", "^tcp", "^ib,tcp", "sm"])
def test_a_variable_that_names_other_transports_stays(named: str) -> None:
    assert not allows_tcp(named)
    assert refused_transfer(TransferSpec(host=BEYOND), rdma=True, ucx_tls=named) is None


def test_a_worker_has_one_kind_or_does_not_start() -> None:
    asked = Deployment(transfer=TransferSpec(host=BEYOND))
    assert with_transfer(asked, rdma=False, ucx_tls=None).transfer.kind == "nccl"
    assert with_transfer(asked, rdma=True, ucx_tls=None).transfer.kind == "nixl"
    refused = Deployment(transfer=TransferSpec(kind="nixl", host=BEYOND))
    with pytest.raises(ConfigError, match="needs RDMA devices"):
        with_transfer(refused, rdma=False, ucx_tls=None)
