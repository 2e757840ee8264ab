"""Certificates that are renewed under load, as the chart's CronJob renews them: the same authority twice,
then its successor. Peers that start in between know the newest files only, and must be accepted by those that
run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tests.kit.lab.fleet import Layout

from kvasir.config.spec.workers import TlsSpec
from kvasir.wire.tls import TlsNames
from kvasir_platform.apps.certify import AUTHORITY_LIVES, KNOWN_AFTER_S, RENEW_AT, Made, renewed
from kvasir_platform.cluster.certificates import CA_FILE
from load_tests.scenarios.cluster.losses import Load, busy, judged, under_load
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, exercise, split

POOLS = ("prefill", "decode")
LIFE_S = 2 * KNOWN_AFTER_S
NAMES = TlsNames("kvasir.local", "scorecard")


@dataclass(frozen=True, slots=True)
class Renewals:
    """`between_s` seconds between renewals."""

    between_s: float = 2.0
    load: Load = Load()


def renewals(now: float) -> list[Made]:
    """Four states of the files, valid at `now`: the first announces a successor of the authority, which signs
    from the third on."""
    late_s = now - KNOWN_AFTER_S - 100.0
    first = renewed({}, NAMES, POOLS, life_s=LIFE_S, now=late_s - LIFE_S * AUTHORITY_LIVES * RENEW_AT - 100.0)
    made = [first]
    for at in (late_s, late_s + KNOWN_AFTER_S / 2, now, now + 1.0):
        made.append(renewed(made[-1].authority, NAMES, POOLS, life_s=LIFE_S, now=at))
    return made[1:]


def written(folder: Path, made: Made) -> None:
    """Replace the files, that of the authorities first, so that no peer shows what another does not know."""
    for name in sorted(made.roles, key=lambda name: name != CA_FILE):
        beside = folder / f".{name}"
        beside.write_bytes(made.roles[name])
        beside.chmod(0o600)
        beside.replace(folder / name)


async def renewed_under_load(trial: Trial, size: Renewals) -> list[Figure]:
    """Three renewals, the second of which changes the authority that signs."""
    folder = trial.folder / "tls"
    folder.mkdir(mode=0o700)
    first, *later = renewals(time.time())
    written(folder, first)
    deployment = split(tls=TlsSpec(mode="files", directory=str(folder)))
    layout = Layout({"prefill": 1, "decode": 1}, reserved={"decode": 1})
    async with exercise(trial, deployment, layout) as fleet:
        addresses = [fleet.address]
        async with under_load(trial, addresses, size.load) as outcomes:
            for number, made in enumerate(later):
                written(folder, made)
                await trial.clock.sleep(size.between_s)
                if number == 1:
                    # Half of the streams go on through a router that knows the newest files only.
                    router = await fleet.add_router()
                    await fleet.all_ready(router)
                    addresses.append(router.address)
            await fleet.start_worker(fleet.workers[-1])
            for router in fleet.routers:
                await fleet.all_ready(router)
            await busy(fleet, fleet.workers[-1])
    signers = {made.roles[CA_FILE] for made in (first, *later)}
    if len(signers) < 2:
        raise NotProven("the authorities did not change")
    return judged(
        outcomes, f"{len(later)} renewals, of which one changed the authority; then a router and a worker"
    )
