"""`kvasir scale POOL=N`: sets a pool's size in place of the planner's; `auto` returns it to the planner."""

from __future__ import annotations

import os

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.commands.restart import control_socket
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cluster.local.commands import ControlCommand, ask

_ANSWER_S = 30.0


def scale(desired_sizes: list[str], name: str | None, output: CommandOutput) -> int:
    """Request each size. Return 0 if all were accepted. Raises ConfigError for an argument that is not POOL=N
    and for a refusal, UpstreamError if nothing runs here."""
    for asked in [_read(desired) for desired in desired_sizes]:
        for answer in ask(control_socket(name, os.environ), asked, _ANSWER_S):
            output.data(answer)
            if answer["event"] == "refused":
                raise ConfigError(str(answer["message"]))
            size = answer.get("replicas")
            output.text(
                f"{asked.pool} is sized by the planner"
                if size is None
                else f"{asked.pool} is set to {size}; see: kvasir status, and kvasir explain scaling"
            )
    return 0


def _read(desired: str) -> ControlCommand:
    pool, _, size = desired.partition("=")
    if pool and size == "auto":
        return ControlCommand("unpin", pool)
    if not pool or not size.isdecimal():
        raise ConfigError(
            f"{desired!r} is not POOL=N: write decode=4 for four replicas, decode=auto to plan again"
        )
    return ControlCommand("scale", pool, int(size))
