"""Changes of a release under load: new pods, an image that never starts, certificates, an installation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from load_tests.cluster_checks.control import STARTED_S
from load_tests.cluster_checks.findings import CheckError, Finding, at_most, equal, holds, shown
from load_tests.cluster_checks.site import Site
from load_tests.cluster_checks.tools import CommandError

UNINSTALLED_S = 30.0
ANNOTATION = "poolDefaults.podAnnotations.kvasir-check"
IMAGE = "poolDefaults.image.repository"
KUBELET_S = 150.0
"""Within which a kubelet has a changed Secret in the pods that mount it."""
BROKEN_S = 60.0
REFUSED_S = 120.0
"""For an upgrade that does not fit, with the image of routers still to be pulled by a node."""
CANNOT_START = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


class Lives:
    """Which pods of workers have been there since this was made; `look` at them often."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._before = {pod.uid for pod in site.workers()}
        self._seen: dict[str, str] = {}
        self._present: set[str] = set()
        self._wanted: set[str] = set()

    def look(self) -> bool:
        """Whether all pods are of the template that the RayCluster has, and serve."""
        pods = self._site.workers()
        self._seen |= {pod.uid: pod.template for pod in pods}
        self._present = {pod.uid for pod in pods}
        wanted = templates(self._site)
        self._wanted = {*wanted.values()}
        return all(pod.template == wanted[pod.pool] for pod in pods) and self._site.serves()

    @property
    def new(self) -> int:
        """How many pods were made."""
        return len(self._seen.keys() - self._before)

    @property
    def thrown_away(self) -> int:
        """How many pods of the wanted template were ended."""
        gone = self._seen.keys() - self._before - self._present
        return sum(self._seen[uid] in self._wanted for uid in gone)


def templates(site: Site) -> dict[str, str]:
    """The template that each pool's pods should be of."""
    return {
        group["groupName"]: group["template"]["metadata"]
        .get("annotations", {})
        .get("kvasir.dev/template", "")
        for group in site.ray_cluster()["spec"]["workerGroupSpecs"]
    }


def upgrade(site: Site, annotation: str) -> None:
    """`helm upgrade` with another template of every pool's pods, and nothing else changed."""
    site.changes(
        "upgrade", site.release, site.chart, "--reuse-values", "--set-string", f"{ANNOTATION}={annotation}"
    )


def upgrades(site: Site) -> Iterator[Finding]:
    """One upgrade of all pods of workers, then two in a row."""
    lives = Lives(site)
    mark = f"{site.tools.now():.0f}"
    with site.load() as load:
        upgrade(site, f"{mark}-1")
        took_s = site.until("every pod is of the new template", lives.look, STARTED_S)
        second = Lives(site)
        upgrade(site, f"{mark}-2")
        begun = partial(_begun, second)
        site.until("the second upgrade has made a pod", begun, STARTED_S)
        upgrade(site, f"{mark}-3")
        site.until("every pod is of the last template", second.look, STARTED_S)
    yield shown("seconds until every pod was of the new template", f"{took_s:.0f}")
    yield equal(f"pods thrown away, of {lives.new} that the upgrade made", lives.thrown_away, 0)
    yield equal(f"the same of the last template, of {second.new}", second.thrown_away, 0)
    yield from load.findings(exact=site.exact)


def rollback(site: Site) -> Iterator[Finding]:
    """An upgrade to an image that does not exist, followed by `helm rollback`."""
    before = templates(site)
    with site.load() as load:
        site.changes(
            "upgrade", site.release, site.chart, "--reuse-values", "--set-string", f"{IMAGE}=never-built"
        )
        took_s = site.until("a pod cannot start", lambda: bool(_stuck(site)), STARTED_S)
        site.tools.pause(BROKEN_S)
        serving = len([pod for pod in site.workers() if pod.ready])
        site.changes("rollback", site.release)
        # Ray does not know a pod that has never started, so nothing but its deletion reaches it.
        stuck = _stuck(site)
        if stuck:
            site.kubectl("delete", "pod", *stuck)
        lives = Lives(site)
        site.until("every pod is of the former template", lives.look, STARTED_S)
    yield shown("pods that served beside the one that could not start", f"{serving}, after {took_s:.0f} s")
    yield equal("templates after the rollback", templates(site), before)
    yield from load.findings(exact=site.exact)


def fit(site: Site) -> Iterator[Finding]:
    """An upgrade to GPUs on which no model fits."""
    number = next((n for n, pool in enumerate(site.spec.pools) if pool.gpus), None)
    if number is None:
        raise CheckError("no pool has a GPU, so the release has no Job that computes whether models fit")
    pool = f"config.pools[{number}]"
    small = ("--set", f"{pool}.gpu=T4", "--set", f"{pool}.engine.gpu_memory_utilization=0.01")
    values = site.helm("get", "values", site.release, "-o", "yaml")
    before, engines, began, refused = templates(site), site.engines(), site.tools.now(), False
    try:
        site.changes("upgrade", site.release, site.chart, "-f", "-", *small, given=values)
    except CommandError:
        refused = True
    yield holds("an upgrade to GPUs that are too small is refused", refused)
    yield at_most("seconds until it is refused", site.tools.now() - began, REFUSED_S, "s")
    said = site.kubectl("logs", f"job/{site.name}-fit")
    why = next((line.strip() for line in said.splitlines() if " does not fit on T4 by " in line), "")
    yield shown("why", why)
    yield holds("the Job's log has the arithmetic", bool(why))
    yield equal("templates after it", templates(site), before)
    yield equal("engines with the same processes", len(site.engines() & engines), len(engines))
    if not refused:
        site.changes("rollback", site.release)


def certificates(site: Site) -> Iterator[Finding]:
    """The CronJob that renews certificates runs at once."""
    job, cron = f"{site.name}-check-{site.tools.now():.0f}", f"cronjob/{site.name}-certify"
    asked = ("get", "secret", f"{site.name}-tls", "-o", "jsonpath={.data.router\\.pem}")
    before = site.kubectl(*asked)
    try:
        with site.load() as load:
            site.kubectl("create", "job", job, f"--from={cron}")
            site.kubectl("wait", "--for=condition=complete", f"job/{job}", "--timeout=300s", timeout_s=320.0)
            site.tools.pause(KUBELET_S)
        yield holds("the router's certificate is another one", site.kubectl(*asked) != before)
        yield from load.findings(exact=site.exact)
        yield holds("all workers serve", site.serves())
    finally:
        site.kubectl("delete", "job", job, "--ignore-not-found")


def reinstall(site: Site) -> Iterator[Finding]:
    """`helm uninstall`, then `helm install` with the same values at once."""
    values = site.helm("get", "values", site.release, "-o", "yaml")
    name, began = site.name, site.tools.now()
    site.helm("uninstall", site.release)
    yield at_most("helm uninstall", site.tools.now() - began, UNINSTALLED_S, "s")
    left = site.kubectl("get", "raycluster", name, "--ignore-not-found", "-o", "name")
    yield equal("RayCluster that is left", left.strip(), "")
    site.helm("install", site.release, site.chart, "-f", "-", given=values)
    took_s = site.until("the new installation serves", site.serves, STARTED_S)
    yield shown("seconds until the new installation serves", f"{took_s:.0f}")
    site.helm("test", site.release)
    yield holds("helm test streams a completion", True)


def _begun(lives: Lives) -> bool:
    return not lives.look() and lives.new > 0


def _stuck(site: Site) -> list[str]:
    return [pod.name for pod in site.workers() if pod.waiting in CANNOT_START]
