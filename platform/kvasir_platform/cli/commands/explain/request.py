"""`kvasir explain REQUEST_ID`: the candidates of a decision, their costs, the choice, and the outcome."""

from __future__ import annotations

from typing import Any

from kvasir.ports.routing import CROSS_ROLE, SCORE
from kvasir_platform.cli.common.gateway_client import decisions
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, milliseconds, number, table

_VERBS = {"prefill": "prefilled", "decode": "decoded", "whole": "run whole"}
_FACTS = (
    ("CACHED", ("cached_tokens",)),
    ("IN TIERS", ("cpu_tokens", "disk_tokens", "remote_tokens")),
    ("QUEUED", ("queued_prefill_tokens",)),
    ("STREAMS", ("streams",)),
)
_NEAR = 1.1
"""Costs this close count as equal; policies choose among them at random."""
Record = dict[str, Any]


def explain(request_id: str, site: Site, output: CommandOutput) -> int:
    """Print each decision of the call. Raises the errors of the gateway client."""
    answer = decisions(site, request_id)
    output.data(answer)
    for i, record in enumerate(answer.get("decisions", ())):
        output.text("\n".join(([""] if i else []) + story(record)))
    for timeline in answer.get("timelines", ())[:1]:
        if timeline.get("route"):
            output.text(f"route {timeline['route']}: answered by its arm {timeline['arm']}")
    return 0


def story(record: Record) -> list[str]:
    """Format one decision as text."""
    lines = [_heading(record), sentence(record)]
    for part in record["parts"]:
        lines += ["", *_part(part)]
    if record["omitted"]:
        lines += ["", f"{record['omitted']:,} more places were considered; the best are shown"]
    if record.get("rates"):
        lines += ["", f"costs began with: {record['rates']}; measurements correct them"]
    return [*lines, "", *_outcome(record)]


def _heading(record: Record) -> str:
    parts = [record["outcome"] or "in flight", f"policy {record['policy']}", record["reason"]]
    parts.append(f"decided in {record['decided_in_s'] * 1e6:,.0f} µs")
    if record["queued_s"] > 0:
        parts.append(f"{milliseconds(record['queued_s'])} after it came")
    if record["attempt"] > 1:
        parts.append(f"attempt {record['attempt']}")
    return f"{record['request_id']}: {', '.join(parts)}"


def sentence(record: Record) -> str:
    """Return the choice, and its reason, in one sentence."""
    why, instead = [], []
    for part in record["parts"]:
        chosen = next((place for place in part["places"] if place["chosen"]), None)
        if chosen is not None:
            why.append(
                f"{_VERBS.get(part['part'], part['part'])} on {_choice_text(chosen, part, record['reason'])}"
            )
        elif part["places"]:
            best = part["places"][0]
            verb = _VERBS.get(part["part"], part["part"])
            instead.append(f"{verb} on {_name(best)} ({_amount(best['total'], part['unit'])})")
    text = ", and ".join(why) or f"decoded on {record['decode_worker']}"
    text = text[0].upper() + text[1:]
    if record["reason"] == CROSS_ROLE:
        text = f"{text}: no worker of the right role served, so one ran all of it"
    return f"{text}, and not {' and '.join(instead)}." if instead else f"{text}."


def _choice_text(chosen: Record, part: Record, reason: str) -> str:
    """Return the chosen worker, and how it compares with the others."""
    places, unit = part["places"], part["unit"]
    if len(places) == 1:
        return f"{_name(chosen)}, the only one that could"
    if not chosen["terms"]:
        return f"{_name(chosen)}, one of {len(places)} that could"
    mine = _amount(chosen["total"], unit)
    if places[0] is not chosen:
        best = places[0]
        close = unit != SCORE and (chosen["total"] or 0.0) <= _NEAR * (best["total"] or 0.0)
        stood = "about as good as" if close else f"by the rule {reason}, not"
        return f"{_name(chosen)} ({mine}), {stood} {_name(best)} ({_amount(best['total'], unit)})"
    runner_up = f"next {_name(places[1])}: {_amount(places[1]['total'], unit)}"
    return f"{_name(chosen)}, the best with {mine} ({runner_up})"


def _part(part: Record) -> list[str]:
    """Return the table of one leg: the known state of each candidate, and its cost terms. Columns of zeros
    are left out."""
    places, unit = part["places"], part["unit"]
    columns = [
        ["", *("*" if place["chosen"] else "" for place in places)],
        ["WORKER", *map(_name, places)],
        ["KV", *(place["kv_state"] for place in places)],
    ]
    if any(place.get("link") for place in places):
        columns.append(["LINK", *(place.get("link", "") for place in places)])
    numbers = len(columns)
    for title, keys in _FACTS:
        counts = [sum(place["facts"].get(key, 0) for key in keys) for place in places]
        columns += [[title, *(f"{count:,.0f}" for count in counts)]] if any(counts) else []
    for term in places[0]["terms"] if places else ():
        amounts = [place["terms"][term] for place in places]
        column = [
            term.removesuffix("_s") if unit == "s" else term,
            *(_figure(each, unit) for each in amounts),
        ]
        columns += [column] if set(column[1:]) != {_figure(0.0, unit)} else []
    if places and places[0]["terms"]:
        columns.append(["TOTAL", *(_figure(place["total"], unit) for place in places)])
    head, *rows = zip(*columns, strict=True)
    what = {"s": "terms in ms", "": "the policy has no cost terms"}.get(unit, f"terms in {unit}")
    title = f"{part['part']}: {len(places)} considered, {what} (* chosen)"
    return [title, *table(head, rows, range(numbers, len(head))).splitlines()]


def _outcome(record: Record) -> list[str]:
    """Return predicted against actual values, and the SLO."""
    cached, ttft, itl = record["actual_cached_tokens"], record["actual_ttft_s"], record["actual_itl_s"]
    predicted = record["queued_s"] + record["predicted_ttft_s"] if record["predicted_ttft_s"] else None
    tiers = record["predicted_tier_tokens"], record["actual_tier_tokens"]
    rows = [
        [
            "cached tokens",
            number(record["predicted_cached_tokens"]),
            number(cached),
            f"of {record['prompt_tokens']:,} in the prompt",
        ],
        *([["from tiers", *map(number, tiers), "of them"]] if any(tiers) else []),
        [
            "TTFT",
            milliseconds(predicted),
            milliseconds(ttft),
            f"{milliseconds(record['slo_ttft_s'])} promised",
        ],
        ["mean ITL", "-", milliseconds(itl), f"{milliseconds(record['slo_itl_s'])} promised"],
    ]
    met = {True: "met", False: "missed", None: "still open" if record["outcome"] is None else "not judged"}
    lines = table(["", "PREDICTED", "ACTUAL", ""], rows, (1, 2)).splitlines()
    return [*lines, f"SLO {record['slo']}: {met[record['slo_met']]}", *_regret(record)]


def _regret(record: Record) -> list[str]:
    """Return what would have cost less, with hindsight; nothing for a decision that was not judged."""
    seconds = record.get("regret_s")
    if seconds is None:
        return []
    if not seconds:
        return ["regret: none; with what is known now, no other place would have cost less"]
    causes = ", ".join(
        f"{cause} {milliseconds(part)}"
        for cause, part in sorted(record["regret_causes"].items(), key=_largest)
    )
    better = " and ".join(record["better"])
    return [
        f"regret: {milliseconds(seconds)} of cost ({causes}); {better} would have cost less, with the first "
        f"token {milliseconds(record['better_ttft_s'])} after the decision"
    ]


def _largest(cause: tuple[str, float]) -> float:
    return -cause[1]


def _name(place: Record) -> str:
    return f"{place['worker_id']}/{place['rank']}" if place["rank"] else str(place["worker_id"])


def _amount(value: float | None, unit: str) -> str:
    if unit == SCORE:
        return f"{unit} {_figure(value, unit)}"
    return f"{_figure(value, unit)} {'ms' if unit == 's' else unit}".rstrip()


def _figure(value: float | None, unit: str) -> str:
    """Format a term. JSON has no infinity: it arrives as null."""
    if value is None:
        return "∞"
    return f"{value * 1e3:,.2f}" if unit == "s" else f"{value:,.4g}"
