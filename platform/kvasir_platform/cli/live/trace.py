"""`kvasir trace REQUEST_ID`: where the time of a request went, what it claims of its workers, and the
decision that placed it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir_platform.cli.commands.explain.request import story
from kvasir_platform.cli.common.gateway_client import decisions
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, milliseconds, table
from kvasir_platform.cli.live.waterfall import WIDTH, waterfall

_PHASES = ("prefill", "decode", "kv", "transfer", "wasted")
_CLAIMS = "Claims on its workers, in proportion to which the busy time of a pool is divided (docs/COST.md):"


def trace(request_id: str, site: Site, output: CommandOutput) -> int:
    """Print the timeline and the decision of each prompt of a call. Raises the errors of the gateway
    client."""
    answer = decisions(site, request_id)
    output.data(answer)
    records = {record["request_id"]: record for record in answer["decisions"]}
    timelines = {each["request_id"]: each for each in answer.get("timelines", ())}
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    for i, name in enumerate({**timelines, **records}):
        lines = [""] if i else []
        lines += (
            waterfall(timelines[name], width) if name in timelines else [f"{name}: its times are not kept"]
        )
        # A gateway of an earlier version sends no claims.
        lines += _claims(timelines.get(name, {}).get("claims") or ())
        lines += ["", *(story(records[name]) if name in records else ["it waits, and was not placed yet"])]
        output.text("\n".join(lines))
    return 0


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that show kvasir_platform.gateway.openai.schema.operation.WorkerClaim as JSON."""
    if not claims:
        return []
    head = ("WORKER", "POOL", *(phase.upper() for phase in _PHASES))
    rows = [
        (each["worker_id"], each["pool"], *(milliseconds(each[f"{phase}_s"]) for phase in _PHASES))
        for each in claims
    ]
    return ["", _CLAIMS, table(head, rows, range(2, len(head)))]
