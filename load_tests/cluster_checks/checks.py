"""The checks, by name: what each does, and what it costs the release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from load_tests.cluster_checks import control, fleet, nodes, release
from load_tests.cluster_checks.findings import Finding
from load_tests.cluster_checks.site import Site


@dataclass(frozen=True, slots=True)
class Check:
    """`needs` is what the cluster must have for it beyond the release."""

    title: str
    act: Callable[[Site], Iterator[Finding]]
    needs: str = ""


CHECKS: Mapping[str, Check] = {
    "small": Check("what the release requests, and what its commands say", fleet.small),
    "threads": Check("how engines share their CPUs", fleet.threads),
    "head": Check("the head's pod is lost ten times", control.head),
    "redis": Check("the bundled Redis restarts", control.redis),
    "readiness": Check("all decode workers are lost", fleet.readiness),
    "upgrades": Check("an upgrade of all workers' pods, then two in a row", release.upgrades),
    "rollback": Check("an upgrade whose image never starts, and its rollback", release.rollback),
    "fit": Check("an upgrade to GPUs on which no model fits", release.fit, "a pool with GPUs"),
    "certificates": Check("certificates are renewed", release.certificates),
    "drain": Check("a drain of the node with a decode worker", nodes.drain, "a second node with room"),
    "cut": Check("a pod's network is cut for 20 s", nodes.cut, "iptables on nodes, and the right to debug"),
    "returns": Check("a pod's network is cut for 3 minutes", nodes.returns, "as cut, and room for another"),
    "failing": Check("a second release whose pool does not start", control.failing, "room for it"),
    "reinstall": Check("the release is uninstalled and installed again", release.reinstall),
}
