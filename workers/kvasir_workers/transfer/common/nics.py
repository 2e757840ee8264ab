"""The network interfaces of a worker's node over which KV can move, read from /sys.

A pod sees every RDMA device of its node there, and can use those whose device files it was given. An Ethernet
interface without a device behind it, such as the end of a pod's network, states a rate that means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvasir.core.locality import MAX_NAME, MAX_NICS, Nic, NicProtocol

ROOT = Path("/")
_ACTIVE = "ACTIVE"


def nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Return the interfaces that are up, RDMA devices first, in the order of their names. `root` is the
    folder that has `sys` and `dev`. What cannot be read is left out."""
    found = [*_rdma(root), *_ethernet(root)]
    return tuple([nic for nic in found if len(nic.name) <= MAX_NAME][:MAX_NICS])


def _rdma(root: Path) -> Iterator[Nic]:
    for device in _entries(root / "sys/class/infiniband"):
        verbs = [entry.name for entry in _entries(device / "device/infiniband_verbs")]
        if not any((root / "dev/infiniband" / name).exists() for name in verbs):
            continue
        ports = [port for port in _entries(device / "ports") if _ACTIVE in _text(port / "state")]
        if ports:
            yield Nic(device.name, NicProtocol.RDMA, max(_rate(_text(port / "rate")) for port in ports))


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
