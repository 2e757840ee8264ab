"""`kvasir explain scaling`: the desired size of each pool, the reasons, and recent actions."""

from __future__ import annotations

import os
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.commands.restart import control_socket
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.cluster.local.commands import ControlCommand, ask

_ANSWER_S = 30.0
_SHOWN = 12
_UNPLANNED = (
    "no planner: sizes are the spec's, or set by `kvasir scale`. A pool with `scaling` (min and max) is "
    "sized by the planner, unless scaling.mode is manual"
)
_FULL = {"itl": "the time between tokens", "memory": "KV memory", "seats": "max_num_seqs"}
Story = dict[str, Any]


def explain_scaling(name: str | None, output: CommandOutput) -> int:
    """Print the explanation. Raises ConfigError if it is refused, UpstreamError if nothing runs here."""
    for answer in ask(control_socket(name, os.environ), ControlCommand("explain", ""), _ANSWER_S):
        if answer["event"] == "refused":
            raise ConfigError(str(answer["message"]))
        story = answer["explanation"]
        output.data(story)
        output.text("\n".join(lines(story)))
    return 0


def lines(story: Story) -> list[str]:
    """Format the explanation as text."""
    return [*(_planned(story) if "pools" in story else [_UNPLANNED]), *_by_hand(story["by_hand"])]


def _planned(story: Story) -> list[str]:
    said = [_status_line(story)]
    pools = story["pools"]
    if pools:
        head = ("POOL", "SERVE", "START", "SHOULD", "BUSY", "PREDICTED", "NEED")
        rows = [
            (
                each["pool"],
                str(each["serving"]),
                str(each["starting"]),
                str(each["size"]),
                f"{each['load']:.1f}",
                f"{each['expected']:.1f} to {each['upper']:.1f}",
                f"{each['need']:.1f}",
            )
            for each in pools
        ]
        said += ["", *table(head, rows, range(1, len(head))).splitlines(), ""]
        for each in pools:
            said += _pool(each)
    acts = story["acts"][-_SHOWN:]
    if acts:
        said += ["", "lately:"]
        said += [f"  {_ago(act['ago_s']):>9}  {_act(act)}" for act in reversed(acts)]
    return said


def _by_hand(pools: list[Story]) -> list[str]:
    if not pools:
        return []
    head = ("POOL", "SERVE", "SHOULD", "WHY")
    rows = [(each["pool"], str(each["serving"]), str(each["size"]), each["why"]) for each in pools]
    return ["", *table(head, rows, (1, 2)).splitlines()]


def _status_line(story: Story) -> str:
    if story["frozen"]:
        return f"sizes are unchanged: {story['frozen']}"
    if story["mode"] == "advise":
        return "scaling.mode is advise: actions are shown, not taken"
    return "the planner sizes the pools"


def _pool(each: Story) -> list[str]:
    said = [f"{each['pool']}: {each['why']}"]
    capacity = each["capacity"]
    if capacity is not None:
        said.append(
            f"  forecast {each['horizon_s']:.0f} s ahead, times the margin {each['margin']:.2f}, which meets "
            f"the SLO with the fewest replicas; {capacity['spare']:.2f} spare replicas keep waits short"
        )
        if each["role"] in ("decode", "both"):
            full = _FULL[capacity["full_by"]]
            said.append(f"  a replica is full with {capacity['streams']} streams, by {full}")
        if each["role"] in ("prefill", "both"):
            said.append(f"  a replica computes {capacity['prompt_tokens_s']:,.0f} prompt tokens a second")
    return said


def _act(act: Story) -> str:
    verb = {"start": "started", "retire": "retired", "flip": "changed to", "wake": "woken"}[act["what"]]
    what = (
        f"{act['count']} {verb} {act['pool']}"
        if act["what"] == "flip"
        else f"{act['pool']}: {act['count']} {verb}"
    )
    return f"{what if act['done'] else 'would be ' + what}: {act['why']}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
