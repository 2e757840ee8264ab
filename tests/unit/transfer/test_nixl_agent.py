"""A NIXL agent is reachable over the interface of its host, and no other."""

from __future__ import annotations

import logging
import os
import socket

import psutil
import pytest

pytest.importorskip("nixl")

from kvasir_workers.transfer.common.nics import interface_of
from kvasir_workers.transfer.nixl import agent as nixl_agent
from kvasir_workers.transfer.nixl.agent import NixlAgent, net_devices


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def addresses() -> list[str]:
    """An IPv4 address of each interface of this machine."""
    found = [each.address for all_of in psutil.net_if_addrs().values() for each in all_of]
    return [address for address in found if "." in address and interface_of(address)]


def test_ucx_listens_on_the_interface_of_the_host_alone() -> None:
    for address in addresses():
        before = listening()
        agent = NixlAgent(f"at {address}", address)
        opened = {ip for ip, _ in listening() - before}
        agent.close()
        assert opened == {address}
    assert "UCX_NET_DEVICES" not in os.environ


def test_devices_that_the_user_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    before = listening()
    agent = NixlAgent("named", next((each for each in addresses() if each != "127.0.0.1"), "127.0.0.1"))
    assert {ip for ip, _ in listening() - before} == {"127.0.0.1"}
    agent.close()
    assert os.environ["UCX_NET_DEVICES"] == "lo"


def test_an_agent_that_starts_while_another_does_has_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "of the other")

    class OtherStarts:
        def __enter__(self) -> None:
            """Wait until the other has started."""
            del os.environ["UCX_NET_DEVICES"]

        def __exit__(self, *_: object) -> None:
            """Nothing waits."""

    monkeypatch.setattr(nixl_agent, "_environment_lock", OtherStarts())
    with nixl_agent._only_devices(("lo",)):
        assert os.environ["UCX_NET_DEVICES"] == "lo"


def test_an_address_that_no_interface_has_restricts_nothing_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert net_devices("192.0.2.99") == ()
    assert "every interface" in caplog.text
    assert net_devices("127.0.0.1") == ("lo",)
    assert net_devices(socket.gethostbyname("localhost")) == ("lo",)
