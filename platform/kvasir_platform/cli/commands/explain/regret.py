"""`kvasir explain` without a request: what other decisions would have saved, with hindsight, by cause."""

from __future__ import annotations

from typing import Any

from kvasir_platform.cli.common.gateway_client import regrets
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, table

CAUSES = {
    "choice": "another place had a lower predicted cost: near equals are sampled",
    "index": "the engine found fewer cached tokens than the index predicted",
    "compute": "prompts took longer per token than the rates said",
    "queue": "the engine was busy for longer than estimated",
    "transfer": "KV took longer over the link, or from a tier",
    "output": "the output was longer or shorter than expected",
}


def explain_regret(site: Site, output: CommandOutput) -> int:
    """Print the regret of the router's decisions. Raises the errors of the gateway client."""
    models = regrets(site)
    output.data({"models": models})
    for i, (model, found) in enumerate(models.items()):
        output.text("\n".join(([""] if i else []) + lines(model, found)))
    if not models:
        output.text("the router has no models")
    return 0


def lines(model: str, found: dict[str, Any]) -> list[str]:
    """Format the regret of the decisions for one model."""
    judged, regretted, seconds = found["judged"], found["regretted"], found["seconds"]
    if not judged:
        return [
            f"{model}: no decision was judged yet. Judged are those of the policy cost whose requests ended "
            "well where they were first placed"
        ]
    head = (
        f"{model}: another place would have cost less for {regretted:,} of {judged:,} judged decisions "
        f"({regretted / judged:.1%}), by {seconds / judged * 1e3:,.3f} ms per decision on average"
    )
    parts = sorted(((part, cause) for cause, part in found["causes"].items() if part > 0.0), reverse=True)
    if not parts:
        return [head]
    rows = [
        (cause, f"{part / judged * 1e3:,.3f}", f"{part / seconds:.0%}", CAUSES.get(cause, ""))
        for part, cause in parts
    ]
    return [head, "", *table(("CAUSE", "MS PER DECISION", "SHARE", ""), rows, (1, 2)).splitlines()]
