"""Network interfaces of a node, as /sys shows them to a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.core.locality import MAX_NICS, Nic, NicProtocol
from kvasir_workers.transfer.common.nics import interface_of, nics, rdma_ports


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def rdma(root: Path, name: str, *, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE") -> None:
    """A device with one port, whose device file the pod was given."""
    device = root / "sys/class/infiniband" / name
    write(device / "ports/1/rate", rate)
    write(device / "ports/1/state", state)
    (device / "device/infiniband_verbs" / f"uverbs-{name}").mkdir(parents=True)
    write(root / "dev/infiniband" / f"uverbs-{name}", "")


def ethernet(root: Path, name: str, *, speed: str = "25000", state: str = "up", device: bool = True) -> None:
    interface = root / "sys/class/net" / name
    write(interface / "speed", speed)
    write(interface / "operstate", state)
    if device:
        (interface / "device").mkdir()


def test_rdma_devices_come_first_with_their_rates(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0")
    rdma(tmp_path, "mlx5_1", rate="100 Gb/sec (4X EDR)")
    rdma(tmp_path, "mlx5_0")
    assert nics(tmp_path) == (
        Nic("mlx5_0", NicProtocol.RDMA, 400_000_000_000),
        Nic("mlx5_1", NicProtocol.RDMA, 100_000_000_000),
        Nic("eth0", NicProtocol.ETHERNET, 25_000_000_000),
    )


def test_the_rate_of_a_device_is_that_of_its_fastest_active_port(tmp_path: Path) -> None:
    rdma(tmp_path, "mlx5_0", rate="100 Gb/sec (4X EDR)")
    for port, state, rate in (("2", "4: ACTIVE", "200 Gb/sec"), ("3", "1: DOWN", "800 Gb/sec")):
        write(tmp_path / f"sys/class/infiniband/mlx5_0/ports/{port}/state", state)
        write(tmp_path / f"sys/class/infiniband/mlx5_0/ports/{port}/rate", rate)
    assert [nic.bits_per_s for nic in nics(tmp_path)] == [200_000_000_000]


def test_a_device_of_the_node_that_the_pod_was_not_given_is_left_out(tmp_path: Path) -> None:
    rdma(tmp_path, "mlx5_0")
    rdma(tmp_path, "mlx5_1")
    (tmp_path / "dev/infiniband/uverbs-mlx5_1").unlink()
    assert [nic.name for nic in nics(tmp_path)] == ["mlx5_0"]


def test_a_device_without_an_active_port_is_left_out(tmp_path: Path) -> None:
    rdma(tmp_path, "mlx5_0", state="1: DOWN")
    assert nics(tmp_path) == ()


def test_an_ethernet_interface_counts_if_it_is_up_and_has_a_device(tmp_path: Path) -> None:
    """A pod's own eth0 has none, and states 10 Gbit/s whatever is behind it."""
    ethernet(tmp_path, "eth0", speed="10000", device=False)
    ethernet(tmp_path, "eth1", state="down")
    ethernet(tmp_path, "eth2")
    assert [nic.name for nic in nics(tmp_path)] == ["eth2"]


@pytest.mark.parametrize("speed", ["-1", "", "fast"])
def test_an_unknown_speed_is_none(tmp_path: Path, speed: str) -> None:
    ethernet(tmp_path, "eth0", speed=speed)
    assert nics(tmp_path) == (Nic("eth0", NicProtocol.ETHERNET),)


@pytest.mark.parametrize("rate", ["", "400", "400 MB", "inf Gb/sec", "nan Gb/sec", "-1 Gb/sec"])
def test_an_unknown_rate_is_none(tmp_path: Path, rate: str) -> None:
    rdma(tmp_path, "mlx5_0", rate=rate)
    assert nics(tmp_path) == (Nic("mlx5_0", NicProtocol.RDMA),)


def test_a_machine_without_interfaces_or_with_too_many_is_no_error(tmp_path: Path) -> None:
    assert nics(tmp_path) == ()
    for number in range(MAX_NICS + 8):
        ethernet(tmp_path, f"eth{number:02}")
    assert len(nics(tmp_path)) == MAX_NICS


def test_ports_of_rdma_devices_are_named_as_ucx_names_them(tmp_path: Path) -> None:
    rdma(tmp_path, "mlx5_0")
    rdma(tmp_path, "mlx5_1", state="1: DOWN")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE")
    assert rdma_ports(tmp_path) == ("mlx5_0:1", "mlx5_0:2")


def test_the_interface_of_an_address_is_found(tmp_path: Path) -> None:
    write(tmp_path / "proc/net/if_inet6", "fd000000000000000000000000000007 02 40 00 80     eth7")
    assert interface_of("127.0.0.1", tmp_path) == "lo"
    assert interface_of("fd00::7", tmp_path) == "eth7"
    for absent in ("192.0.2.1", "fd00::8", "0.0.0.0", "no-such-host.invalid"):
        assert interface_of(absent, tmp_path) is None
