"""Ray's head, Redis with its state, and pools that do not start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from load_tests.cluster_checks.findings import CheckError, Finding, at_most, equal, holds, shown
from load_tests.cluster_checks.site import Site

HEAD_END_S = 10.0
TAKEN_OVER_S = 300.0
STARTED_S = 1800.0
ATTEMPTS = 2
MISTAKE, CAUSE = "VLLM_ENGINE_READY_TIMEOUT_S", "invalid literal for int() with base 10: 'never'"
"""A variable that vLLM reads while an engine starts, and what it says of a value that is no number."""


def head(site: Site) -> Iterator[Finding]:
    """The head's pod is deleted, every other time without its grace, as when its node is lost."""
    engines, ends = site.engines(), list[float]()
    with site.load() as load:
        for number in range(site.times):
            pod, began = site.head(), site.tools.now()
            lost = ("--grace-period=0", "--force") if number % 2 else ()
            site.kubectl("delete", "pod", pod.name, *lost, timeout_s=180.0)
            if not lost:
                ends.append(site.tools.now() - began)
            taken_over = partial(_other_head, site, pod.uid)
            site.until("the next head has taken the pools over", taken_over, TAKEN_OVER_S)
    yield at_most("longest end of the head's pod", max(ends), HEAD_END_S, "s")
    yield _outlived(site, engines)
    yield from load.findings(exact=site.exact)


def redis(site: Site) -> Iterator[Finding]:
    """The pod of the bundled Redis is deleted."""
    pods = site.pods("redis")
    if not pods:
        raise CheckError("the release has no Redis of its own; restart yours, and compare as this check does")
    engines, pod = site.engines(), pods[0]
    if not pod.persistent:
        yield shown("volume of Redis", "none: engines end with the state of Ray's head")
    with site.load() as load:
        site.kubectl("delete", "pod", pod.name, timeout_s=180.0)
        site.until("another Redis is ready", lambda: _another(site, pod.uid), TAKEN_OVER_S)
        # Ray's head ends with its connection, a second later.
        site.tools.pause(5.0)
        took_s = site.until("all pools serve", site.serves, TAKEN_OVER_S if pod.persistent else STARTED_S)
    yield shown("seconds until all pools serve", f"{took_s:.0f}")
    if pod.persistent:
        yield _outlived(site, engines)
        yield from load.findings(exact=site.exact)
    else:
        yield shown("engines that outlived it", len(site.engines() & engines))
        yield shown("failed requests", load.noticed["failed"])
        yield shown("requests refused with Retry-After", load.noticed["refused_with_wait"])


def failing(site: Site) -> Iterator[Finding]:
    """A second release whose first pool does not start, for which the cluster needs room."""
    other = replace(site, release=f"{site.release}-failing")
    pool = site.spec.pools[0].name
    wrong = f"pools.{pool}.env[0]"
    values = site.helm("get", "values", site.release, "-o", "yaml")
    if "fullnameOverride" in values:
        raise CheckError("fullnameOverride is set, so a second release would have the same names")
    mistake = ("--set", f"{wrong}.name={MISTAKE}", "--set-string", f"{wrong}.value=never")
    try:
        site.helm("install", other.release, site.chart, "-f", "-", *mistake, given=values)
        other.until("the pool has failed twice", lambda: _attempts(other, pool) >= ATTEMPTS, STARTED_S)
        detail = _detail(other, pool)
        yield shown("status", detail)
        yield holds("the status has the engine's error", CAUSE in detail)
        log = other.kubectl("logs", other.head().name, "-c", "control")
        starts = [each for each in log.splitlines() if '"start_failed"' in each and f'"{pool}"' in each]
        yield holds(
            "the head's log has each attempt with the error",
            len([x for x in starts if CAUSE in x]) >= ATTEMPTS,
        )
        if other.ray_cluster()["spec"].get("enableInTreeAutoscaling"):
            of_it = f"involvedObject.kind=RayCluster,involvedObject.name={other.name},reason=PoolStartFailed"
            asked = ("get", "events", "--field-selector", of_it, "-o", "jsonpath={.items[*].message}")
            yield holds("an event of the RayCluster has the error", CAUSE in other.kubectl(*asked))
        logs = [other.kubectl("logs", pod.name, "-c", "worker") for pod in other.workers(pool)]
        yield holds("the log of the worker's pod has the error", any(CAUSE in each for each in logs))
    finally:
        # Without the flag, the error of an installation that was refused would be that there is no release.
        site.helm("uninstall", other.release, "--ignore-not-found")


def _other_head(site: Site, uid: str) -> bool:
    return site.head().uid != uid and site.serves()


def _another(site: Site, uid: str) -> bool:
    return any(pod.uid != uid and pod.ready for pod in site.pods("redis"))


def _outlived(site: Site, engines: frozenset[tuple[str, int, int]]) -> Finding:
    return equal("engines with the same processes", len(site.engines() & engines), len(engines))


def _detail(site: Site, pool: str) -> str:
    return next((str(each["detail"]) for each in site.pool_states() if each["pool"] == pool), "")


def _attempts(site: Site, pool: str) -> int:
    words = _detail(site, pool).split()
    return int(words[1]) if words[:1] == ["attempt"] else 0
