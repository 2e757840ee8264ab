"""Files that several scenarios depend on, and how much of them may change.

How many lines may change follows from the width of the paths. A line that is rewritten counts twice, removed
and added. Of a few files that figures depend on directly, a change as large as one rewritten function of a
screen, 60 lines, is allowed; of a part of a process, one rewritten module of 400 lines; of whole processes,
three of these. More than a tenth of the lines is never allowed, which a test checks.
"""

from __future__ import annotations

FUNCTION, MODULE, MODULES = 120, 800, 2400

NATIVE = ("platform/kvasir/native/**",)
GATEWAY = ("platform/kvasir_platform/gateway/**/*.py", *NATIVE)
ROUTER = ("router/kvasir_router/**/*.py", "platform/kvasir/wire/**/*.py", "proto/**/*.proto")
WORKERS = ("workers/kvasir_workers/**/*.py",)
MOVEMENT = (
    "workers/kvasir_workers/connector/**/*.py",
    "workers/kvasir_workers/tiers/**/*.py",
    "workers/kvasir_workers/transfer/**/*.py",
)
ENGINES = ("workers/kvasir_workers/engines/**/*.py", *MOVEMENT)
CLUSTER = ("platform/kvasir_platform/cluster/**/*.py", "platform/kvasir_platform/apps/**/*.py")
SIMULATION = ("platform/kvasir_platform/sim/**/*.py", "platform/kvasir_platform/workload/**/*.py")
DECISION = ("router/kvasir_router/decide/**/*.py", "router/kvasir_router/index/**/*.py", *NATIVE)
STACK = (*GATEWAY, *ROUTER, *WORKERS, *CLUSTER)


def measuring(*places: str) -> tuple[str, ...]:
    """The measuring code itself, under load_tests."""
    return tuple(f"load_tests/{place}" for place in places)
