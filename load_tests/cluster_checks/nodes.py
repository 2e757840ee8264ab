"""Losses of nodes: a drain, and a network that is cut while processes live."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvasir.core.requests import Role
from load_tests.cluster_checks.control import STARTED_S
from load_tests.cluster_checks.findings import CheckError, Finding, equal, shown
from load_tests.cluster_checks.site import Pod, Site

SYSTEM = "kube-system"
CUT_S, LONG_CUT_S = 20.0, 180.0
"""Within what sessions are kept [worker.resume_window_s and Ray's patience], and beyond both."""


def drain(site: Site) -> Iterator[Finding]:
    """`kubectl drain` of the node with a decode worker; other nodes must have room for what runs there."""
    victim = _victim(site)
    routers = [pod for pod in site.pods("router") if pod.node != victim.node]
    if not routers:
        raise CheckError(f"all routers are on {victim.node}, and the load with them: use more nodes")
    try:
        with site.load(router=routers[0]) as load:
            asked = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=900s")
            site.kubectl("drain", victim.node, *asked, timeout_s=960.0)
            took_s = site.until("all pools serve on other nodes", site.serves, STARTED_S)
    finally:
        site.kubectl("uncordon", victim.node)
    yield shown("seconds until all pools serve on other nodes", f"{took_s:.0f}")
    yield equal("workers left on the node", len([x for x in site.workers() if x.node == victim.node]), 0)
    yield from load.findings(exact=site.exact)


def cut(site: Site) -> Iterator[Finding]:
    """The network of one decode worker's pod is cut for a while."""
    return _cut(site, CUT_S)


def returns(site: Site) -> Iterator[Finding]:
    """The same, until Ray has replaced its replica; the pod comes back to a fleet that has another."""
    return _cut(site, LONG_CUT_S)


def _cut(site: Site, seconds: float) -> Iterator[Finding]:
    victim, engines = _victim(site), site.engines()
    with site.load() as load:
        site.tools.pause(5.0)
        # A pod in the node's namespaces: packets from and to the victim's address are dropped.
        rules = (f"FORWARD -s {victim.ip} -j DROP", f"FORWARD -d {victim.ip} -j DROP")
        put, taken = ("; ".join(f"iptables -{verb} {rule}" for rule in rules) for verb in "ID")
        script = f"{put}; sleep {seconds:.0f}; {taken}"
        _on_node(site, victim.node, script, seconds + 120.0)
        took_s = site.until("all pools serve after the cut", site.serves, STARTED_S)
    yield shown("seconds from the end of the cut until all pools serve", f"{took_s:.0f}")
    yield shown("engines with the same processes", f"{len(site.engines() & engines)} of {len(engines)}")
    yield from load.findings(exact=site.exact)


def _victim(site: Site) -> Pod:
    ready = [pod for pod in site.workers(site.pool_of(Role.DECODE, Role.BOTH)) if pod.ready]
    if not ready:
        raise CheckError("no decode worker is ready")
    return ready[0]


def _on_node(site: Site, node: str, script: str, timeout_s: float) -> None:
    """Run a script on a node as its root, in a pod of a namespace that enforces no standard for pods."""
    debug = ("debug", f"node/{node}", "--profile=sysadmin", f"--image={site.image}", "--attach")
    said = site.tools.run(
        ["kubectl", "-n", SYSTEM, *debug, "--", "chroot", "/host", "sh", "-c", script], timeout_s=timeout_s
    )
    if (made := re.search(r"node-debugger-\S+", said)) is not None:
        site.tools.run(["kubectl", "-n", SYSTEM, "delete", "pod", made[0], "--ignore-not-found"])
