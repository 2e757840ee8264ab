"""`kvasir rollout`: what the canaries of a running deployment came to, and orders for them."""

from __future__ import annotations

from typing import Any

from kvasir.core.errors import RequestError
from kvasir_platform.cli.common.gateway_client import order_rollout, rollouts
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, duration, number, table

_HEAD = ("ROUTE", "MODEL", "CANARY", "PHASE", "SHARE", "STEP", "FOR", "COMPARED", "FAILED", "SLO MISSED")
_NUMBERS = (4, 7, 8, 9)
_CRITERIA = {
    "errors": "errors",
    "slo": "SLO class missed",
    "ttft": "time to first token",
    "itl": "time between tokens",
}


def status(route: str | None, site: Site, output: CommandOutput) -> int:
    """Print one line for each rollout, and what speaks against the canary of each. Raises the errors of the
    gateway client, and RequestError for an unknown route."""
    found = rollouts(site)
    if route is not None:
        found = [_of(found, route)]
    output.data(found)
    if not found:
        output.text("no route has a canary; add one to routes in kvasir.yaml")
        return 0
    output.text(table(_HEAD, [_row(each) for each in found], _NUMBERS))
    for each in found:
        output.text("\n".join(("", *_details(each))))
    return 0


def order(route: str | None, action: str, site: Site, output: CommandOutput) -> int:
    """Send an order, and print the rollout after it. Without `route`, the only rollout is meant. Raises as
    `status`, and RequestError for an order that does not apply."""
    if route is None:
        known = rollouts(site)
        if len(known) != 1:
            names = ", ".join(str(each.get("route")) for each in known) or "none"
            raise RequestError(f"name the route; there are: {names}", code="rollout_not_found")
        route = str(known[0]["route"])
    done = order_rollout(site, route, action)
    output.data(done)
    output.text(f"{route}: {done['phase']}, {_percent(done['share'])} of requests go to {done['canary']}")
    return 0


def _of(found: list[dict[str, Any]], route: str) -> dict[str, Any]:
    for each in found:
        if each.get("route") == route:
            return each
    names = ", ".join(str(each.get("route")) for each in found) or "none"
    raise RequestError(f"no route {route!r} with a canary; there are: {names}", code="rollout_not_found")


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    counts, step = each["counts"], each.get("step")
    return (
        str(each["route"]),
        str(each["model"]),
        str(each["canary"]),
        str(each["phase"]),
        _percent(each["share"]),
        "-" if step is None else f"{step + 1} of {len(each['steps'])}",
        "-" if each.get("for_s") is None else duration(each["for_s"]),
        "-" if step is None else f"{each['compared']:,} of {each['min_requests']:,}",
        number(counts.get("canary_failed", 0)),
        number(counts.get("canary_slo_missed", 0)),
    )


def _details(each: dict[str, Any]) -> list[str]:
    counts, threshold = each["counts"], each["threshold"]
    lines = [f"{each['route']}: {each['reason']}"] if each["reason"] else [f"{each['route']}:"]
    for name, found in each["evidence"].items():
        worse, better = counts.get(f"{name}_worse", 0), counts.get(f"{name}_better", 0)
        if worse or better:
            lines.append(
                f"  {_CRITERIA.get(name, name)}: worse in {worse:,} of {worse + better:,} comparisons, "
                f"evidence {found:.1f} of {threshold:.1f}"
            )
    if not each["shared"]:
        lines.append("  this router decides alone: set tenancy.redis if there are several")
    elif each["stale_s"] > 5:
        lines.append(f"  the shared state was last read {duration(each['stale_s'])} ago")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
