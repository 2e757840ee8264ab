"""What is measured of the index, the policies and the planner: on this CPU, and in virtual time."""

from __future__ import annotations

from load_tests.suite.scenario import ANY, Scenario, names
from load_tests.suite.tables.paths import DECISION, FUNCTION, MODULE, SIMULATION, measuring

INDEX = Scenario(
    "index",
    "make bench-index",
    "load_tests.scenarios.index",
    (
        "ingest, a stored block from the wire",
        "ingest, a removed block",
        "memory of a block",
        "memory of a block after half were removed at random",
        "lookup, a block matched",
        "lookup, a prompt of 32,768 tokens",
        "lookup, the same, out of the caches",
        "hash, a prompt of 32,768 tokens",
        "remove a dead worker",
        "remove, its memory reclaimed",
        "remove, the longest slice",
        "snapshot and suffix until exact",
        "snapshot, the longest part",
        "decision, 64 pairs",
        "decision, 1,024 pairs",
        "decision, accounting and prediction",
        *names("event to shadow, block of {size}", size=(16, 64, 128)),
    ),
    (
        *DECISION,
        *measuring("scenarios/index.py", "scenarios/index_parts.py", "peers/*.py", "index_workload.py"),
    ),
    lines=MODULE,
    minutes=8,
)

_COMPARATORS = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "session",
    "consistent_hash",
    "prefix",
    "dynamo",
    "llm_d",
    "sglang",
    "mooncake",
    "production_stack",
)
_GRIDS = ("dynamo", "llm_d", "sglang", "mooncake")
_TUNED = tuple(f"{name}_tuned" for name in _GRIDS)
_ALL = ("cost", *_COMPARATORS, "mooncake_no_transfer", *_TUNED)
_FAR_BELOW = ("round_robin", "session", "consistent_hash", "prefix", "production_stack")
# Policies that are far below the others on 4 workers are not measured on more.
_NEAR = tuple(name for name in _ALL if name not in _FAR_BELOW)
_APART = tuple(name for name in _NEAR if name != "power_of_two")
_MIXED = (*_NEAR, "session", "consistent_hash")
_AZURE = tuple(name for name in _NEAR if name not in ("mooncake", "mooncake_tuned"))
_AT_ONE_SPEED = ("load max/mean", "TTFT p50", "TTFT p99", "requests that met the promise")
_OF_CACHES = ("hits of an infinite cache's", "requests whose hit was foreseen")


def _fleet(fleet: str, policies: tuple[str, ...], figures: tuple[str, ...]) -> tuple[str, ...]:
    speed = f"speed-up {ANY}"
    return (
        *names("goodput, {who}, {fleet}", who=policies, fleet=(fleet,)),
        *names("{figure}, {who}, {fleet}, {at}", who=policies, figure=figures, fleet=(fleet,), at=(speed,)),
    )


POLICIES = Scenario(
    "policies",
    "make bench-policies TRACE=mooncake_conversation.jsonl AZURE=azure_2023_conv.csv",
    "load_tests.scenarios.policies",
    (
        *_fleet("4 workers", _ALL, (*_AT_ONE_SPEED, *_OF_CACHES)),
        *_fleet("16 workers", _NEAR, (*_AT_ONE_SPEED, *_OF_CACHES)),
        *_fleet("64 workers", _NEAR, (*_AT_ONE_SPEED, *_OF_CACHES)),
        *names("grid, {who}, {point}, 16 workers", who=_GRIDS, point=(ANY,)),
        *names(
            "goodput, cost, 16 workers, {change}",
            change=("another seed", "half the caches", "halves of the trace swapped"),
        ),
        *_fleet("12 prefill + 4 decode", _APART, (*_AT_ONE_SPEED, *_OF_CACHES)),
        *_fleet("mixed, 16 workers", _MIXED, (*_AT_ONE_SPEED, *_OF_CACHES)),
        *_fleet("Azure, 16 workers", _AZURE, _AT_ONE_SPEED),
    ),
    (*DECISION, "router/kvasir_router/fleet/**/*.py", *SIMULATION, *measuring("scenarios/policies/*.py")),
    lines=MODULE,
    minutes=45,
    arguments=("{trace}", "--azure", "{azure}"),
    needs=("trace", "azure"),
)

SIMULATOR = Scenario(
    "sim",
    "make bench-sim",
    "load_tests.scenarios.simulator",
    (
        "virtual seconds per second, 16 workers",
        "an hour on 1,000 workers",
        "seeds of 1,000 that replay exactly",
        *names(
            "goodput of the fluid bound, {preset}, {who}",
            preset=("chat", "rag", "agents"),
            who=("cost", *_COMPARATORS),
        ),
        f"showcase, {ANY} experiments",
        *names(
            "plan of {model} on four GPU types",
            model=("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-120b"),
        ),
        "plan of four models on four GPU types, in all",
    ),
    (
        *DECISION,
        "router/kvasir_router/fleet/**/*.py",
        *SIMULATION,
        "platform/kvasir_platform/capacity/search.py",
        *measuring("scenarios/simulator/*.py"),
    ),
    lines=MODULE,
    minutes=20,
)

_DAYS = ("wave", "bursts")

AUTOSCALE = Scenario(
    "autoscale",
    "make bench-autoscale TRACE=mooncake_conversation.jsonl",
    "load_tests.scenarios.autoscale",
    (
        *names("GPU-hours, {day}, {who}", day=_DAYS, who=("ours", "hpa", "ttft", "static", "queue")),
        *names(
            "{figure}, {day}, ours",
            day=_DAYS,
            figure=("SLO kept", "most workers alive", "starts a day", "planning a day"),
        ),
    ),
    (
        "platform/kvasir_platform/planner/**/*.py",
        "platform/kvasir_platform/sim/scaling/**/*.py",
        *measuring("scenarios/autoscale/*.py"),
    ),
    lines=FUNCTION,
    minutes=60,
    arguments=("{trace}",),
    needs=("trace",),
)

REGIONS = Scenario(
    "regions",
    "make bench-regions",
    "load_tests.scenarios.regions",
    (
        *names(
            "{figure}, {who}",
            who=("kvasir", "kvasir with prices", "nearest only", "round robin"),
            figure=(
                "cost of a day",
                "TTFT p99",
                "TTFT p99 as an outage begins",
                "wait p99",
                "requests that met the promise",
                "requests in another region",
            ),
        ),
        "requests outside of their tenant's regions",
        "requests executed in two regions at a time",
        "shared limit, the worst hour",
        "shared limit, the worst minute beyond its bound",
    ),
    (
        "router/kvasir_router/regions/*.py",
        "platform/kvasir_platform/planner/**/*.py",
        *measuring("scenarios/regions/*.py"),
    ),
    lines=FUNCTION,
    minutes=4,
)
