"""Where a worker runs, and how near two workers are to each other.

KV moves between workers. How long that takes depends first of all on the link between them, so workers report
their location, and routers derive the class of the link of each pair. What is not known is never guessed: a
pair of workers of which too little is known has the class UNKNOWN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

MAX_NAME = 253
"""Longest name of a place: that of a Kubernetes node. Values of labels are at most 63 characters."""
MAX_NICS = 32


class NicProtocol(StrEnum):
    """What a network interface speaks."""

    RDMA = "rdma"
    ETHERNET = "ethernet"


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface: its name in the system, and its rate in bits per second, 0 if unknown."""

    name: str
    protocol: NicProtocol
    bits_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Locality:
    """The location of a worker; "" stands for unknown. GPUs of one `nvlink_domain` reach each other over
    NVLink. Raises ValueError for a name that is longer than MAX_NAME, and for more than MAX_NICS NICs."""

    node: str = ""
    zone: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    nics: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        names = (self.node, self.zone, self.rack, self.nvlink_domain, *(nic.name for nic in self.nics))
        for name in names:
            if len(name) > MAX_NAME:
                raise ValueError(f"the name {name[:40]!r}… of a place has more than {MAX_NAME} characters")
        if len(self.nics) > MAX_NICS:
            raise ValueError(f"{len(self.nics)} NICs are more than {MAX_NICS}")

    def completed(self, other: Locality) -> Locality:
        """Return this locality, with what `other` knows in place of what is unknown."""
        if other == NOWHERE:
            return self
        return Locality(
            self.node or other.node,
            self.zone or other.zone,
            self.rack or other.rack,
            self.nvlink_domain or other.nvlink_domain,
            self.nics or other.nics,
        )

    @property
    def nic_bits_per_s(self) -> int:
        """Rate of the fastest NIC over which KV can move: an RDMA device if there is one, because transfers
        prefer it. 0 if unknown."""
        rdma = [nic.bits_per_s for nic in self.nics if nic.protocol is NicProtocol.RDMA]
        return max(rdma or [nic.bits_per_s for nic in self.nics], default=0)


NOWHERE = Locality()


class LinkClass(IntEnum):
    """The path between two workers, from near to far."""

    NVLINK = 0
    NODE = 1
    RACK = 2
    ZONE = 3
    CROSS_ZONE = 4
    UNKNOWN = 5

    @property
    def label(self) -> str:
        """The name in the spec, in metrics and in decision records."""
        return self.name.lower()


KNOWN_LINKS = tuple(LinkClass)[: LinkClass.UNKNOWN]


def link_class(one: Locality, other: Locality) -> LinkClass:
    """Return the class of the link between two workers: the nearest that their names show. Racks of
    different zones are different racks, whatever their names."""
    if _same(one.nvlink_domain, other.nvlink_domain):
        return LinkClass.NVLINK
    if _same(one.node, other.node):
        return LinkClass.NODE
    if one.zone and other.zone and one.zone != other.zone:
        return LinkClass.CROSS_ZONE
    if _same(one.rack, other.rack):
        return LinkClass.RACK
    return LinkClass.ZONE if _same(one.zone, other.zone) else LinkClass.UNKNOWN


def _same(one: str, other: str) -> bool:
    return one != "" and one == other
