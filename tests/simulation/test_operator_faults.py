"""An operator recognizes a fault: the page that the console reads, `kvasir top` and an alert each name it.
The fleet runs in virtual time, and promtool decides which alerts its series fire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.observability.mix import CERTIFICATE_DAYS, FAULTS, InjectedFault, watched_deployment
from tests.kit.observability.promtool import Watched, first_firing
from tests.kit.observability.watched_fleet import WatchedFleet, cancelled

from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

NOW = 1_800_000_000.0
EXPIRES = NOW + CERTIFICATE_DAYS * 86_400.0
CALM_S = 10.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    authority = Authority.make("test", NOW - 86_400.0, EXPIRES + 86_400.0)
    path = tmp_path_factory.mktemp("tls") / "tls.pem"
    path.write_bytes(authority.certify("spiffe://x/y", "api.example.com", NOW, EXPIRES))
    path.chmod(0o600)
    return path


async def watch(fault: InjectedFault, certificate: Path) -> tuple[Watched, str, dict[str, str]]:
    """The scrapes, what `kvasir top` prints at the end, and the problems of /status by code."""
    spec = watched_deployment(certificate)
    fleet = WatchedFleet(spec, VirtualClock(), wall_s=NOW, expires_s=EXPIRES)
    await fleet.start()
    first = fleet.scrape()
    await fleet.run(CALM_S)
    assert fleet.status()["verdict"]["ok"], fleet.status()["verdict"]
    before, was = fleet.scrape(), fleet.scene.wall_s
    await fault.inject(fleet.scene)
    await fleet.run(fault.seconds)
    walls = (was, fleet.scene.wall_s)
    watched = Watched(first, before, fleet.scrape(), CALM_S, fault.seconds, walls)
    top, problems = fleet.top(), fleet.status()["verdict"]["problems"]
    await cancelled(asyncio.all_tasks() - {asyncio.current_task()})
    return watched, top, {problem["code"]: problem["text"] for problem in problems}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_console_top_and_an_alert_name_a_fault(
    fault: InjectedFault, certificate: Path, tmp_path: Path
) -> None:
    watched, top, problems = run_virtual(watch(fault, certificate))
    assert fault.text in problems.get(fault.code, ""), problems
    assert fault.text in top.replace("\n", " ")
    fired = first_firing(watched, tmp_path)
    assert fault.alerts <= fired.keys()
    assert min(fired.values()) >= 0, fired
