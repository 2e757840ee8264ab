"""Where a NIXL agent is reachable: by default over no port at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest

pytest.importorskip("nixl")

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.nics import interface_of, rdma_ports
from kvasir_workers.transfer.nixl import agent as nixl_agent
from kvasir_workers.transfer.nixl.agent import NixlAgent, ucx_variables


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def addresses() -> list[str]:
    """An IPv4 address of each interface of this machine."""
    found = [each.address for all_of in psutil.net_if_addrs().values() for each in all_of]
    return [address for address in found if "." in address and interface_of(address)]


def opened_by(host: str, *, tcp: bool = False) -> set[str]:
    """The addresses at which an agent listens that serves on `host`."""
    before = listening()
    agent = NixlAgent(f"at {host}", host, tcp=tcp)
    opened = {ip for ip, _ in listening() - before}
    agent.close()
    return opened


def test_an_agent_on_one_machine_opens_no_port() -> None:
    assert opened_by("127.0.0.1") == set()
    assert "UCX_TLS" not in os.environ


def test_only_the_user_opens_what_an_agent_shares_on_one_machine() -> None:
    agent = NixlAgent("shares", "127.0.0.1")
    try:
        handles = [each for each in list(Path("/proc/self/fd").iterdir()) if each.is_symlink()]
        shared = [each for each in handles if "ucx_shm" in str(each.readlink())]
        assert shared
        assert {each.stat().st_mode & 0o077 for each in shared} == {0}
        assert "SYSV" not in Path("/proc/self/maps").read_text()
    finally:
        agent.close()


def test_an_agent_between_machines_without_rdma_devices_starts_no_transport() -> None:
    if rdma_ports():
        pytest.skip("there are RDMA devices here")
    before = listening()
    for address in addresses():
        if not address.startswith("127."):
            with pytest.raises(TransferError):
                NixlAgent(f"at {address}", address)
    assert listening() == before


def test_with_tcp_it_listens_on_the_interface_of_the_host_alone_and_never_on_one_machine() -> None:
    for address in addresses():
        assert opened_by(address, tcp=True) == (set() if address.startswith("127.") else {address})
    assert "UCX_NET_DEVICES" not in os.environ


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert opened_by("127.0.0.1") == {"127.0.0.1"}
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for address in addresses():
        assert opened_by(address) == {"127.0.0.1"}
    assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("tcp,self", "lo")


def test_variables_with_which_ucx_cannot_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")
    with pytest.raises(TransferError, match=r"UCX backend with UCX_TLS=sm,self of the environment \("):
        NixlAgent("cannot start", "127.0.0.1")


def test_between_machines_ucx_has_the_rdma_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "rdma_ports", lambda: ("mlx5_0:1", "mlx5_1:1"))
    monkeypatch.setattr(nixl_agent, "interface_of", lambda host: "eth0")
    both = "mlx5_0:1,mlx5_1:1"
    assert ucx_variables("10.0.0.7", {}, tcp=False) == {"UCX_TLS": "^tcp", "UCX_NET_DEVICES": both}
    assert ucx_variables("10.0.0.7", {}, tcp=True) == {"UCX_NET_DEVICES": f"eth0,{both}"}
    named = {"UCX_NET_DEVICES": "mlx5_0:1"}
    assert ucx_variables("10.0.0.7", named, tcp=False) == {"UCX_TLS": "^tcp"}


def test_what_another_agent_sets_while_it_starts_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "of the other")

    class OtherStarts:
        def __enter__(self) -> None:
            """Wait until the other has started."""
            del os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]

        def __exit__(self, *_: object) -> None:
            """Nothing waits."""

    monkeypatch.setattr(nixl_agent, "_environment_lock", OtherStarts())
    with nixl_agent._ucx_environment("127.0.0.1", tcp=False):
        assert os.environ["UCX_TLS"].startswith("^tcp")
        assert "UCX_NET_DEVICES" not in os.environ


def test_an_address_that_no_interface_has_restricts_nothing_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ucx_variables("192.0.2.99", {}, tcp=True) == {}
    assert "every interface" in caplog.text
