"""What cells ask each other of limits that they share, and the answers."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvasir.ports.limits import PerMinute
from kvasir_router.regions.limits import Allotment, AllotmentAsk
from kvasir_router.regions.sharing.slots import SlotAsk, SlotGrant


class LimitAsk(msgspec.Struct, frozen=True, array_like=True):
    """What a cell asks of the home cell of a tenant's limit."""

    tenant: str
    limit: PerMinute
    ask: AllotmentAsk


class LimitAllotted(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    tenant: str
    limit: PerMinute
    allotment: Allotment


class TenantSlotAsk(msgspec.Struct, frozen=True, array_like=True):
    """What a cell asks of the home cell of a tenant's concurrency."""

    tenant: str
    ask: SlotAsk


class TenantSlots(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    tenant: str
    grant: SlotGrant


class AskCell(Protocol):
    """Sends an ask to another cell; False if there is no link to it."""

    def __call__(self, cell: str, ask: LimitAsk | TenantSlotAsk) -> bool: ...
