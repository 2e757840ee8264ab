"""What a transfer costs over each class of link: estimates before the first transfer, and what is measured.

The estimates are those of common hardware, a little below its nominal rates:

    nvlink      one direction of NVLink 4 (H100: 450 GB/s)
    node        PCIe 4.0 x16, for GPUs of one node that are not known to share an NVLink domain
    rack        one 100 Gbit/s port, or the NIC that the worker reports
    zone        half of that: links between racks are commonly shared by twice the traffic that they carry
    cross_zone  one flow of 5 Gbit/s, the limit of AWS outside of a placement group; RDMA ends at the zone

Transfers correct the estimates. The first transfer of a pair also connects the two, and a class that is
avoided is not measured again: so one measurement counts for a few times what was expected at most, and what
was measured of a class fades with the time in which only others are used. A class is never expected to be
faster than a nearer one that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.core.identity import WorkerIdentity
from kvasir.core.locality import KNOWN_LINKS, LinkClass
from kvasir_router.decide.fits import LinearFit, differ

TRANSFER_SCALE_BYTES = float(16 << 20)
"""Bytes of a typical transfer."""
SLOWEST = 4.0
"""The most that a measurement counts for, as a multiple of what was expected."""
_WEIGHT = 2.0
"""Weight of an estimate, in measurements."""
_HALF_LIFE_S = 30.0
_NIC_PART = 0.8
"""The part of a NIC's nominal rate that a transfer reaches."""
_OVERSUBSCRIPTION = 2.0
_HANDOFF_S = 0.003
"""Time of a transfer without bytes: messages and the steps of both engines."""
_ROUND_TRIPS_S = 0.003
"""Three round trips between zones of one region, of about a millisecond each."""

LinkNumbers = tuple[float, ...]
"""One number for each class in KNOWN_LINKS."""


class LinkRates(NamedTuple):
    """Seconds of a transfer over each known class of link, as `fixed + per byte`."""

    fixed_s: LinkNumbers
    byte_s: LinkNumbers

    def seconds(self, link: LinkClass, moved_bytes: float) -> float:
        """Return the seconds of one transfer."""
        return self.fixed_s[link] + moved_bytes * self.byte_s[link]

    def times(self, factor: float) -> LinkRates:
        """Return the rates of a worker whose transfers take so many times as long."""
        return LinkRates(*(tuple([factor * each for each in numbers]) for numbers in self))

    def differ(self, other: LinkRates, part: float) -> bool:
        """Return whether any class differs by more than this fraction of the other's seconds."""
        mine, theirs = zip(*self, strict=True), zip(*other, strict=True)
        return any(
            differ(one, another, TRANSFER_SCALE_BYTES, part)
            for one, another in zip(mine, theirs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LinkSetting:
    """What an operator knows about a class of link; None for what is left to the estimates."""

    bytes_per_s: float | None = None
    latency_s: float | None = None


LinkPriors = Callable[[WorkerIdentity], LinkRates]


def link_rates_of(
    identity: WorkerIdentity, settings: Mapping[LinkClass, LinkSetting] | None = None
) -> LinkRates:
    """Return the estimates for what a worker receives."""
    return _estimated(identity.locality.nic_bits_per_s, settings or {})


def _estimated(nic_bits_per_s: float, settings: Mapping[LinkClass, LinkSetting]) -> LinkRates:
    nic = nic_bits_per_s / 8.0 * _NIC_PART or 1e10
    bandwidths = {
        LinkClass.NVLINK: 4e11,
        LinkClass.NODE: 2.5e10,
        LinkClass.RACK: nic,
        LinkClass.ZONE: nic / _OVERSUBSCRIPTION,
        LinkClass.CROSS_ZONE: min(6e8, nic),
    }
    fixed, per_byte = [], []
    for link in KNOWN_LINKS:
        setting = settings.get(link) or LinkSetting()
        latency_s = _HANDOFF_S + (_ROUND_TRIPS_S if link is LinkClass.CROSS_ZONE else 0.0)
        fixed.append(latency_s if setting.latency_s is None else setting.latency_s)
        per_byte.append(1.0 / (setting.bytes_per_s or bandwidths[link]))
    return LinkRates(tuple(fixed), tuple(per_byte))


DEFAULT_LINKS = _estimated(0.0, {})
"""The estimates for a worker that reports no NIC."""


class LinkFits:
    """What was measured over each class, drawn to `priors`."""

    def __init__(self, priors: LinkRates) -> None:
        self._priors = priors
        self._fits = [
            LinearFit(fixed_s, byte_s, TRANSFER_SCALE_BYTES, _WEIGHT)
            for fixed_s, byte_s in zip(*priors, strict=True)
        ]
        self._now = 0.0
        self.rates = priors

    def observe(self, link: LinkClass, moved_bytes: float, seconds: float, now: float) -> None:
        """Learn from one transfer over a known class, which ended at `now`."""
        faded = 0.5 ** (max(0.0, now - self._now) / _HALF_LIFE_S)
        self._now = max(now, self._now)
        seconds = min(seconds, SLOWEST * self.rates.seconds(link, moved_bytes))
        fixed_s = byte_s = 0.0
        for each, fit in enumerate(self._fits):
            if each == link:
                fit.observe(moved_bytes, seconds)
            else:
                fit.fade(faded)
            # No class is faster than a nearer one that was measured.
            fit.draw_to(max(self._priors.fixed_s[each], fixed_s), max(self._priors.byte_s[each], byte_s))
            if fit.measured:
                fixed_s, byte_s = max(fixed_s, fit.fixed_s), max(byte_s, fit.per_unit_s)
        self.rates = LinkRates(
            tuple([fit.fixed_s for fit in self._fits]), tuple([fit.per_unit_s for fit in self._fits])
        )
