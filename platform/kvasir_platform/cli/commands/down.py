"""`kvasir down`: stop a deployment from any terminal, or clean up after one that was killed."""

from __future__ import annotations

from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.running import chosen_one
from kvasir_platform.cluster.local.cleanup import stop_supervisor, sweep


def down(name: str | None, output: CommandOutput) -> int:
    """Stop, wait, and verify that nothing is left. It is no error if nothing runs."""
    found = chosen_one(name)
    if found is None:
        output.text(f"nothing runs{f' under the name {name}' if name else ''}")
        output.data({"stopped": None})
        return 0
    runtime, state = found
    if runtime.holder() is not None:
        output.text(f"stopping {state.name} (pid {state.pid})")
    stop_supervisor(runtime, state)
    left = sweep(runtime)
    for mark, things in (("killed ", left.killed), ("removed", left.removed), ("REMAINS", left.remaining)):
        for thing in things:
            output.text(f"  {mark}  {thing}")
    if not left.remaining:
        output.text(f"{state.name} is stopped: nothing is left running")
    output.data(
        {"stopped": state.name, "killed": left.killed, "removed": left.removed, "remaining": left.remaining}
    )
    return 1 if left.remaining else 0
