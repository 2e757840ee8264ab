"""What is measured under faults: the scorecard, losses of a cluster, and alerts."""

from __future__ import annotations

from load_tests.suite.scenario import Scenario, names
from load_tests.suite.tables.paths import MODULE, MODULES, STACK, measuring

_GAP = "p99 of the longest gap"
_WRONG = "streams with an error, or a lost, repeated or wrong token"
_BEYOND = "p99 of times to first token, beyond that without a fault"
_PROBED = "p that the prober's times are of one distribution"

_SCORECARD: dict[str, tuple[str, ...]] = {
    "row 1: SIGKILL of a decode worker": (
        "streams exact",
        _WRONG,
        "p99 of the longest gap of the streams that were hit",
        *names("with real vLLM: {what}", what=("streams exact", "until nothing is held")),
    ),
    "row 2: SIGKILL of a prefill worker": (
        _WRONG,
        "until no block is leased and nothing accounted for",
        *names("with real vLLM: {what}", what=("streams exact", "until nothing is held")),
    ),
    "row 3: KV transfer stalls, is cut, has a flipped bit": names(
        "{transport}: {what}",
        transport=("nixl", "nccl"),
        what=(
            "streams with a wrong token",
            "time to first token beyond that without a fault",
            "prefill workers that ended of a pull that failed",
        ),
    ),
    "row 4: SIGSTOP of one worker in eight": (
        "until the router says that it gives the worker nothing",
        "until the last request was sent that waited for the frozen worker",
        _GAP,
        _WRONG,
    ),
    "row 5: partition of ten seconds": (
        "until the worker is out of use",
        "until it is ready and its cache EXACT, after healing",
        _GAP,
        _WRONG,
    ),
    "row 6: a router is killed": (
        "until a fresh router knows all blocks exactly",
        "blocks known exactly by it",
        "streams of the killed router that were cut",
        _WRONG,
    ),
    "row 7: KV events are lost, repeated, reordered": (
        "histories in which a router's view differs from a cache",
    ),
    "row 8: a tier is killed, stopped, slow, full, read-only": (
        *names(f"Redis {{fault}}: {_BEYOND}", fault=("killed", "stopped", "slow", "full")),
        *names(f"disk {{fault}}: {_BEYOND}", fault=("full", "read-only")),
        "Redis: p99 of times to first token of slow hits, to that of computed prompts",
        *names(
            "{tier}: {what}",
            tier=("Redis", "disk"),
            what=(
                "failed requests",
                "requests with a wrong token",
                "faults that the worker's log does not tell in one line, with what to do",
                "until the tier is used again after the fault",
            ),
        ),
    ),
    "row 9: garbage, old and foreign blobs in a tier": (
        "prompts with a wrong token",
        "tampered prompts of which a block was used",
        "tampered prompts, less what the tiers counted as corrupt",
    ),
    "row 10: overload, greedy tenants, long prompts": (
        *names(
            "at {times} times the load: {what}",
            times=(2, 5),
            what=(
                "goodput, of its peak",
                "p99 until a refusal is answered",
                "refusals without Retry-After or a code",
                "growth of the router's memory over that at its peak",
            ),
        ),
        _WRONG,
        "change of p99 TTFT beside a greedy tenant",
        "change of p99 TTFT beside very long prompts",
    ),
    "row 11: every worker answers 503": ("legs for each request", "served once workers serve again"),
    "row 12: most workers unhealthy, or loads stale": (
        "histories in which nothing was served",
        "served with 60 % of the workers failing",
        "served with loads that are stale",
    ),
    "row 13: rolling restarts": (
        "failed requests",
        "longest drain, from SIGTERM to the end of the process",
        _GAP,
        _WRONG,
    ),
    "row 14: a cold worker joins": ("p99 of times to first token after it joined, to that before",),
    "row 15: client disconnects": (
        "p99 until no engine runs anything of those who left",
        "disconnects that the gateway counted",
        "requests, blocks, descriptors and tasks leaked",
        "growth of the router's memory over the second half",
    ),
    "row 16: slow readers": (
        "memory of the router for a stream that is not read",
        "change of the others' p99 gap",
        _WRONG,
    ),
    "row 17: slow and oversized requests": (
        "until the last of a kind is cut",
        "change of the others' p99 gap",
        "growth of the router's memory under attack",
        _WRONG,
    ),
    "row 18: malformed requests, also through a proxy": (
        "cases",
        "cases that are not answered as they must be",
        "crashes",
        "answers that went to another client",
    ),
    "row 19: a tenant probes the cache of another": (
        *names(
            "{where}: {what}",
            where=("one worker", "prefill and decode apart, with a tier"),
            what=(_PROBED, "cached tokens of others"),
        ),
        f"embeddings: {_PROBED}",
        "prompts found within a group that shares",
        "cached tokens found in a group by others, and by its own under a salt",
    ),
    "row 20: wrong or expired certificates": ("impostors accepted", "streams dropped on rotation"),
    "row 21: URLs that lead inside": (
        "vectors",
        "connections into the trap",
        "vectors that were not denied as they must be",
    ),
    "row 22: secrets and dependencies": (
        "secrets where others can read them",
        "secrets in the repository",
        "locked packages without a hash",
    ),
    "row 23: simulated failures replay": (
        "histories that replay exactly",
        "histories with a broken invariant",
        "speed",
    ),
    "row 24: a long mixed load": (
        "growth of the router's memory for a request",
        "growth of a worker's memory for a request",
        "descriptors gained in 1,000 requests",
        "tasks of the router gained in 1,000 requests",
        _WRONG,
    ),
}

SCORECARD = Scenario(
    "scorecard",
    "make scorecard",
    "load_tests.scenarios.scorecard",
    tuple(f"{row}, {figure}" for row, figures in _SCORECARD.items() for figure in figures),
    (*STACK, *measuring("scenarios/scorecard/**/*.py"), "tests/kit/lab/**/*.py"),
    lines=MODULES,
    minutes=60,
)

_LOSSES = (
    "a node's network is cut while its processes live",
    "a node comes back after its replica was replaced, while it keeps its session",
    "a node comes back after its replica was replaced, when its session has ended",
    "a drain of the node with the only decode replica",
    "certificates are renewed",
    "two upgrades in a row",
    "an upgrade whose image never starts, and its rollback",
)

_REAL = (
    "Ray's head is killed ten times",
    "Redis restarts with its volume",
    "a drain of the node with the only decode replica",
    "an upgrade whose image never starts, and its rollback",
)
_REAL_FIGURES = (
    "failed requests",
    "longest gap of a stream",
    "streams with a lost, repeated or wrong token",
)

LOSSES = Scenario(
    "cluster",
    "make bench-cluster",
    "load_tests.scenarios.cluster",
    (
        *names("{loss}: {what}", loss=_LOSSES, what=("failed requests", "longest gap of a stream", _WRONG)),
        *names(
            "Redis restarts without a volume: {what}",
            what=(
                "until both pools serve again",
                "failed requests",
                "streams with a lost, repeated or wrong token",
            ),
        ),
        *names("real engines: {loss}: {what}", loss=_REAL, what=_REAL_FIGURES),
        *names("real engines: {loss}: engines with the same process", loss=_REAL[:2]),
    ),
    (*STACK, *measuring("scenarios/cluster/*.py")),
    lines=MODULES,
    minutes=25,
)

_FAULTS = (
    "queueing",
    "slow prefill",
    "slow transfer",
    "slow decode",
    "cold cache",
    "bad worker",
    "greedy tenant",
    "lost role",
    "partition",
    "tier in trouble",
    "stalls",
    "moved streams",
    "fragmented KV",
    "stopped control",
    "stopped services",
    "old certificate",
    "no workers",
    "forgotten caches",
    "failing workers",
)

ALERTS = Scenario(
    "alerts",
    "make bench-alerts",
    "load_tests.scenarios.alerts",
    (
        *names("{fault}: {what}", fault=_FAULTS, what=("until the first alert", "until /status names it")),
        "expressions of dashboards that had a value",
        "expressions of dashboards that a fault moved",
    ),
    (
        "platform/kvasir/telemetry/**/*.py",
        "platform/kvasir_platform/dashboards/**/*.py",
        "helm/kvasir/files/**",
        *measuring("scenarios/alerts/*.py"),
        "tests/kit/observability/*.py",
    ),
    lines=MODULE,
    minutes=19,
)
