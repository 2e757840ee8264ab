"""`kvasir restart POOL`: replaces the workers of a pool while they serve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.running import chosen_one
from kvasir_platform.cluster.local.commands import SOCKET, ControlCommand, ask, socket_path

# The longest silence between two progress lines: one worker loads its model, another drains.
_QUIET_S = 4200.0


def restart(pool: str, name: str | None, output: CommandOutput) -> int:
    """Request the restart, show its progress, and return 0 if all were replaced. Raises ConfigError if it is
    refused, UpstreamError if nothing runs here."""
    status = 1
    for answer in ask(control_socket(name, os.environ), ControlCommand("restart", pool), _QUIET_S):
        output.data(answer)
        if answer["event"] == "refused":
            raise ConfigError(str(answer["message"]))
        for line in _lines(answer):
            output.text(line)
        if answer["event"] == "done":
            status = 0
    return status


def control_socket(name: str | None, environ: Mapping[str, str]) -> Path:
    """Return the address of the control process's socket; in a pod, the pod's template sets it."""
    if named := environ.get(SOCKET):
        return Path(named)
    found = chosen_one(name)
    if found is None or found[0].holder() is None:
        called = f" under the name {name}" if name else ""
        raise UpstreamError(f"nothing runs here{called}; start with: kvasir up", code="not_ready")
    return socket_path(Path(found[1].temp_dir))


def _lines(answer: dict[str, Any]) -> list[str]:
    match answer["event"]:
        case "started":
            how = (
                "each new one beside the old"
                if answer["beside"]
                else "each stopped first: no capacity for one more"
            )
            return [f"restarting {answer['pool']}: {answer['replicas']} replicas, one at a time, {how}"]
        case "progress":
            return [f"  {answer['replaced']} of {answer['wanted']} replaced"]
        case "done":
            return [f"{answer['pool']} is restarted"]
        case "failed":
            why = str(answer["message"]).strip()
            return [f"{answer['replaced']} of {answer['wanted']} replaced, the others go on serving: {why}"]
    return []
