"""What routers say while workers are away, and how engines share their CPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvasir.core.requests import Role
from load_tests.cluster_checks.control import STARTED_S
from load_tests.cluster_checks.findings import CheckError, Finding, equal, holds, shown
from load_tests.cluster_checks.site import COMPONENT, ENGINES, INSTANCE, Site

AWAY_S = 30.0
STREAMED_S = 30.0
TRY_OUT_CPUS = 2.0


def readiness(site: Site) -> Iterator[Finding]:
    """All decode workers are lost at once."""
    pool = site.pool_of(Role.DECODE, Role.BOTH)
    routers = {pod.uid for pod in site.pods("router") if pod.ready}
    lost = [pod.name for pod in site.workers(pool)]
    looks, not_ready = 0, 0
    with site.load() as load:
        site.kubectl("delete", "pod", *lost, "--grace-period=0", "--force")
        began = site.tools.now()
        while site.tools.now() - began < AWAY_S:
            looks += 1
            not_ready += not routers <= {pod.uid for pod in site.pods("router") if pod.ready}
            site.tools.pause(1.0)
        site.until("the pool serves again", site.serves, STARTED_S)
    yield equal(f"looks at which a router was not ready, of {looks}", not_ready, 0)
    yield from load.findings(exact=site.exact, waits=True)


def threads(site: Site) -> Iterator[Finding]:
    """How threads of engines wait, and the time between tokens of 1 and 8 streams."""
    engines = [
        each for pod in site.workers() for each in site.processes(pod) if each["name"].startswith(ENGINES)
    ]
    cpu = not any(pool.reserved_gpus for pool in site.spec.pools)
    policies = {each["threads"].get("OMP_WAIT_POLICY", "unset") for each in engines}
    if cpu:
        yield equal("OMP_WAIT_POLICY of engines", ", ".join(sorted(policies)), "PASSIVE")
    yield equal("niceness of engines", ", ".join(sorted({str(each["nice"]) for each in engines})), "0")
    for streams in (1, 8):
        with site.load(streams) as load:
            site.tools.pause(STREAMED_S)
        said = load.noticed
        yield shown(
            f"{streams} streams",
            f"ITL p50 {said['itl_p50_ms']:.1f} ms, p99 {said['itl_p99_ms']:.1f} ms, longest gap "
            f"{1000 * said['longest_gap_s']:.0f} ms",
        )


def small(site: Site) -> Iterator[Finding]:
    """What the release asks for, and what its own commands say of it."""
    selector = f"{INSTANCE}={site.release}"
    pods = json.loads(site.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    asked = sum(_cpus(pod) for pod in pods if pod["status"].get("phase") == "Running")
    expected = f"at most {TRY_OUT_CPUS:g} for the try-out" if _is_try_out(site) else ""
    yield Finding(
        "CPUs that the release's pods request",
        f"{asked:.2f}",
        expected,
        asked <= TRY_OUT_CPUS or not expected,
    )
    router = site.router().name
    said = site.kubectl(
        "exec", router, "-c", "router", "--", "kvasir", "check", "-f", "/etc/kvasir/config/kvasir.yaml"
    )
    yield holds("`kvasir check` finds nothing in the modes of mounted files", "chmod" not in said)
    states = site.pool_states()
    if not states:
        raise CheckError("the control process does not say how its pools are")
    pool = states[0]
    control = ("exec", site.head().name, "-c", "control", "--", "kvasir")
    site.kubectl(*control, "scale", f"{pool['pool']}={pool['wanted']}")
    explained = site.kubectl(*control, "explain", "scaling")
    yield holds("`kvasir explain scaling` explains a size set by hand", pool["pool"] in explained)
    if any(each.name == pool["pool"] and each.scaling for each in site.spec.pools):
        site.kubectl(*control, "scale", f"{pool['pool']}=auto")
    secrets = [
        each["secret"]
        for pod in pods
        if pod["metadata"].get("labels", {}).get(COMPONENT) == "worker"
        for each in pod["spec"]["volumes"]
        if "secret" in each
    ]
    yield equal(
        "modes of mounted Secrets",
        sorted({oct(each.get("defaultMode", 0o644)) for each in secrets}),
        ["0o440"],
    )


def _is_try_out(site: Site) -> bool:
    return len(site.spec.pools) == 2 and not any(pool.reserved_gpus for pool in site.spec.pools)


def _cpus(pod: dict[str, object]) -> float:
    """What the scheduler keeps for a pod: its containers together, or an init container that needs more."""
    spec = pod["spec"]
    assert isinstance(spec, dict)
    together = sum(map(_request, spec["containers"]))
    return max([together, *map(_request, spec.get("initContainers", []))])


def _request(container: dict[str, object]) -> float:
    resources = container.get("resources") or {}
    assert isinstance(resources, dict)
    text = str((resources.get("requests") or {}).get("cpu", "0"))
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
