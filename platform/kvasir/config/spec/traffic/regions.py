"""The part of the deployment spec for regions: this cell's name, the other cells, and which tenants stay.

Each region is one cell: a deployment of its own that serves without the others. Cells exchange what a request
needs to run anywhere, so every address here is reached under mutual TLS, or is on this machine.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec, is_loopback
from kvasir.config.spec.workers import TlsSpec

_ADDRESS = r"^(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):[0-9]{1,5}$"
Amount = Annotated[float, Field(ge=0, le=1e6)]


def host_of(address: str) -> str:
    """Return the host of `host:port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


class PeerCellSpec(Spec):
    """Another cell."""

    name: Name
    """Its `regions.name`."""
    address: str = Field(pattern=_ADDRESS, max_length=300)
    """`host:port` of its `regions.listen`."""
    deployment: Name | None = None
    """Its deployment's `name`, which its certificate carries. Default: `name` of this entry."""
    network_s: float | None = Field(default=None, ge=0, le=10)
    """Time that a request takes to the cell and its first token back, without computing. Unset: measured."""

    @property
    def certified_as(self) -> str:
        """The deployment in the cell's certificate."""
        return self.deployment or self.name


class RegionsSpec(Spec):
    """This deployment as one cell of several. Requests that another cell would answer sooner, or that this
    one cannot serve, run there. See docs/REGIONS.md."""

    name: Name
    """Name of this cell, which is that of its region."""
    listen: str = Field(default="127.0.0.1:0", pattern=_ADDRESS, max_length=300)
    """`host:port` where routers of other cells connect. An address other than loopback needs certificates."""
    peers: tuple[PeerCellSpec, ...] = Field(default=(), max_length=32)
    """The other cells."""
    residency: dict[Name, tuple[Name, ...]] = Field(default={}, max_length=1000)
    """By tenant, the cells where its requests may run. Others refuse its requests, and a cell never sends
    them to one that is not listed. Unlisted tenants may run anywhere."""
    lost_after_s: float = Field(default=1.0, ge=0.5, le=30)
    """A cell that does not hear another for this long has lost it, and ends what it runs for the other, which
    may then run it again. All cells need the same value."""
    stale_after_s: float = Field(default=1.75, ge=1.1, le=60)
    """Reports of cells that are older count only where there is none that is newer."""
    spill_margin_s: float = Field(default=0.05, ge=0, le=60)
    """Another cell must be faster than this one by this much, beyond the network, to get a request."""
    price: Amount = 0.0
    """Price of a million tokens here, in the same currency in all cells."""
    price_weight_s: float = Field(default=0.0, ge=0, le=1e6)
    """Seconds of TTFT that one unit of price is worth. 0: prices are not considered."""
    max_forwarded: int = Field(default=1024, ge=1, le=100_000)
    """Maximum requests of this cell that run in one other cell, and of one other router here."""

    @model_validator(mode="after")
    def _cells_named_apart(self) -> Self:
        names = [self.name, *(peer.name for peer in self.peers)]
        if len(set(names)) != len(names):
            raise ValueError(f"peers: names of cells must differ, found {names}; rename one")
        certified = [peer.certified_as for peer in self.peers]
        if len(set(certified)) != len(certified):
            raise ValueError(
                f"peers: deployments must differ, found {certified}; they tell which cell a certificate is of"
            )
        for tenant, cells in self.residency.items():
            for cell in cells:
                if cell not in names:
                    raise ValueError(
                        f"residency: {tenant} names unknown cell {cell!r}; the cells are {', '.join(names)}"
                    )
        return self

    @property
    def hosts(self) -> list[str]:
        """The hosts of this cell and of the others."""
        return [host_of(self.listen), *(host_of(peer.address) for peer in self.peers)]

    def problem(self, deployment: str, tenants: Container[str], tls: TlsSpec) -> str | None:
        """Return what is wrong with the section in a deployment of this name, with these tenants; None for
        nothing."""
        for tenant in self.residency:
            if tenant not in tenants:
                return (
                    f"regions.residency: unknown tenant {tenant!r}; list it in tenancy.tenants, or remove it"
                )
        for peer in self.peers:
            if peer.certified_as == deployment:
                return (
                    f"regions.peers: {peer.name} has the deployment {deployment!r}, which is this one; cells "
                    "are told apart by `name` of the spec: give each another one"
                )
        exposed = [host for host in self.hosts if not is_loopback(host)]
        if exposed and tls.mode == "off":
            return (
                f"regions: {exposed[0]} is on the network, and tls.mode is off; set tls.directory, or "
                "tls.ca_file, cert_file and key_file: cells take requests only from routers that prove theirs"
            )
        return None
