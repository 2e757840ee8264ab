"""The network interfaces of a worker's node over which KV can move, read from /sys and from the kernel.

A pod sees every RDMA device of its node there, and can use those whose device files it was given. An Ethernet
interface without a device behind it, such as the end of a pod's network, states a rate that means nothing.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from kvasir.core.locality import MAX_NAME, MAX_NICS, Nic, NicProtocol

ROOT = Path("/")
_ACTIVE = "ACTIVE"
_SIOCGIFADDR = 0x8915
"""The request for an interface's IPv4 address, of linux/sockios.h; the address is at bytes 20 to 24."""


def nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Return the interfaces that are up, RDMA devices first, in the order of their names. `root` is the
    folder that has `sys` and `dev`. What cannot be read is left out."""
    found = [*_rdma(root), *_ethernet(root)]
    return tuple([nic for nic in found if len(nic.name) <= MAX_NAME][:MAX_NICS])


def interface_of(host: str, root: Path = ROOT) -> str | None:
    """Return the interface that has an address of the host's, None if none has."""
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    return next((name for name, address in _addresses(root) if address in wanted), None)


def rdma_ports(root: Path = ROOT) -> tuple[str, ...]:
    """Return the active ports of the RDMA devices as UCX names them, such as `mlx5_0:1`."""
    return tuple(f"{device.name}:{port.name}" for device, ports in _rdma_devices(root) for port in ports)


def _addresses(root: Path) -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                yield name, str(IPv4Address(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
            except OSError:
                # It has no IPv4 address.
                continue
    for line in _text(root / "proc/net/if_inet6").splitlines():
        address, *_, name = line.split()
        yield name, str(IPv6Address(bytes.fromhex(address)))


def _rdma(root: Path) -> Iterator[Nic]:
    for device, ports in _rdma_devices(root):
        yield Nic(device.name, NicProtocol.RDMA, max(_rate(_text(port / "rate")) for port in ports))


def _rdma_devices(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the devices of which the pod has a device file, and their active ports, at least one each."""
    for device in _entries(root / "sys/class/infiniband"):
        verbs = [entry.name for entry in _entries(device / "device/infiniband_verbs")]
        if not any((root / "dev/infiniband" / name).exists() for name in verbs):
            continue
        ports = [port for port in _entries(device / "ports") if _ACTIVE in _text(port / "state")]
        if ports:
            yield device, ports


def _ethernet(root: Path) -> Iterator[Nic]:
    for interface in _entries(root / "sys/class/net"):
        if (interface / "device").exists() and _text(interface / "operstate") == "up":
            megabits = _text(interface / "speed")
            rate = int(megabits) * 1_000_000 if megabits.isdigit() else 0
            yield Nic(interface.name, NicProtocol.ETHERNET, rate)


def _rate(text: str) -> int:
    """Return the bits per second of a text such as `400 Gb/sec (4X NDR)`; 0 for another."""
    number, _, rest = text.partition(" ")
    try:
        return max(0, int(float(number) * 1e9)) if rest.startswith("Gb/sec") else 0
    except (ValueError, OverflowError):
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        # Also for the speed of an interface that is down.
        return ""
