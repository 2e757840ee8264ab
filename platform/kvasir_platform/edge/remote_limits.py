"""Rate limits counted by the core for all its edges, so that a tenant has one quota rather than one per
edge."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvasir.ports.limits import BucketLevels, Grant, LimitRefusal, Quota
from kvasir_platform.edge.frames import LimitRequest, LimitResponse, LimitSettled
from kvasir_platform.gateway.tenants.memory_limits import check_amount

if TYPE_CHECKING:
    from kvasir_platform.edge.core_link import CoreLink

log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    tenant: str
    quota: Quota
    tokens: int
    then: Callable[[Grant | LimitRefusal], None]


class LinkGrant(Grant):
    """A grant, with the number of its request to the core."""

    number: int

    def __new__(cls, grant: Grant, number: int) -> LinkGrant:
        """The same grant, numbered."""
        made = super().__new__(cls, *grant)
        made.number = number
        return made


class RemoteLimits:
    """`kvasir.ports.limits.RateLimits` over a link. Without a core no request is refused here: admitted
    requests then fail because there is no router."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._asked: dict[int, _Asked] = {}
        self._last = 0

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """Ask the core; the response arrives in a later iteration of the event loop."""
        check_amount(quota, tokens)
        asked = _Asked(tenant, quota, tokens, then)
        if self._link.lost:
            _let_in(asked)
            return
        self._last += 1
        self._asked[self._last] = asked
        self._link.say().takes.append(LimitRequest(self._last, tenant, quota, tokens))

    def settle(self, grant: Grant, tokens: int) -> None:
        """See the port."""
        self._end(grant, tokens)

    def release(self, grant: Grant) -> None:
        """See the port."""
        self._end(grant, None)

    async def run(self) -> None:
        """Return at once: there is no background work."""

    def heard(self, leave: LimitResponse) -> None:
        """Handle a response of the core."""
        asked = self._asked.pop(leave.number, None)
        verdict = LinkGrant(leave.grant, leave.number) if leave.grant is not None else leave.refusal
        if asked is None or verdict is None:
            return
        try:
            asked.then(verdict)
        except Exception:  # one request's fault must not end the link that serves the others
            log.exception("a request of tenant %s failed after its admission", asked.tenant)

    def lost(self) -> None:
        """Handle the loss of the core."""
        waiting, self._asked = self._asked, {}
        for asked in waiting.values():
            _let_in(asked)

    def _end(self, grant: Grant, tokens: int | None) -> None:
        if isinstance(grant, LinkGrant) and not self._link.lost:
            self._link.say().settled.append(LimitSettled(grant.number, tokens))


def _let_in(asked: _Asked) -> None:
    asked.then(Grant(asked.tenant, asked.quota, asked.tokens, BucketLevels()))
