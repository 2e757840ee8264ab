"""When a request that another cell runs may run again: at most one cell runs a request at any time.

The origin cannot ask a cell that it does not hear whether it has stopped. The right to run its requests is
therefore a lease (Gray and Cheriton, SOSP 1989), on the serving cell's own clock: it ends `lease_s` after
that cell *sent* the last beat that the origin has echoed. The origin knows that moment to be no later than
the one at which it echoed the beat, so that it can wait for the end of the lease without a message, a common
clock, or a bound on the time that a message takes. Nothing that arrives later extends a lease that has ended,
because the link ends with it.
"""

from __future__ import annotations

from kvasir_router.regions.fencing import FenceRules

BEATS = 5
"""Beats of the serving cell in the time of one lease."""
_QUIET_SHARE = 0.9
_CLOCK_RATES = 0.02
_STOPPING_S = 0.1
"""How long a serving cell takes to have its workers end what runs there."""


def fence_rules(lease_s: float) -> FenceRules:
    """Return the rules of both ends of a link. Beats need no bound on their delay: see above."""
    return FenceRules(
        heartbeat_s=lease_s / BEATS,
        quiet_s=_QUIET_SHARE * lease_s,
        orphan_s=lease_s,
        delay_s=0.0,
        skew_s=_CLOCK_RATES * lease_s + _STOPPING_S,
    )
