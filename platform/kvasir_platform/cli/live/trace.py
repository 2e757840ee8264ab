"""`kvasir trace REQUEST_ID`: where the time of a request went, and the decision that placed it."""

from __future__ import annotations

import shutil

from kvasir_platform.cli.commands.explain.request import story
from kvasir_platform.cli.common.gateway_client import decisions
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.live.waterfall import WIDTH, waterfall


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
        lines += ["", *(story(records[name]) if name in records else ["it waits, and was not placed yet"])]
        output.text("\n".join(lines))
    return 0
