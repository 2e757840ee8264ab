"""Chunks over HTTPS: the router process that `kvasir up` starts with a certificate for clients, and HAProxy
that terminates TLS in front of workers that answer at the same times.

Both encrypt in user space with OpenSSL. The kernel's TLS needs a socket that OpenSSL writes to itself, and
both uvloop and asyncio encrypt into memory.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from tests.kit.cluster.api_wire import certificate_for

from load_tests.report import Row, median
from load_tests.scenarios.gateway.bodies import SIZES
from load_tests.scenarios.gateway.measure import (
    DELTAS_A_MESSAGE,
    Samples,
    chunk_name,
    chunks,
    say,
    warm_up,
)
from load_tests.scenarios.gateway.pacing import TOKENS_PER_S
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import Child, ProcessError
from load_tests.scenarios.gateway.rows import chunk_title
from load_tests.scenarios.gateway.systems import Stand, System, await_serving
from load_tests.vocabulary import large_model

BEGINNING = "https, "
"""How the names of these rows begin."""
MOST_RATIO = 1.0
MEASURED = tuple(deltas for deltas in DELTAS_A_MESSAGE if deltas > 1)
STREAMS = 256
"""A client in Python decrypts for as long as the routers encrypt."""
_NAME = "https"
_SHORT = SIZES[0]
_WARM_UP_SCALE = 0.3


def https_rows(folder: Path, *, rounds: int, scale: float) -> list[Row]:
    """All rows; `scale` shortens each measurement. Raise ProcessError."""
    samples = Samples()
    authority, pair = certificate_for("127.0.0.1")
    certificate = folder / "certificate.pem"
    certificate.write_bytes(pair + authority)
    with Stand(folder, large_model(), Packages()) as stand:
        client = stand.client()
        systems = {"ours": _ours(stand, folder, certificate), "haproxy": stand.haproxy(certificate)}
        for system in systems.values():
            await_serving(client, system)
        warm_up(client, list(systems.values()), samples, _WARM_UP_SCALE)
        for number in range(rounds):
            say(f"https, round {number + 1} of {rounds}")
            _round(client, systems, samples, scale)
    if samples.wrong:
        raise ProcessError("; ".join(f"{what}: {why}" for what, why in samples.wrong.items()))
    return rows_of(samples)


def _ours(stand: Stand, folder: Path, certificate: Path) -> System:
    """The router with HTTPS."""
    tls = {"cert_file": str(certificate), "key_file": str(certificate)}
    gateway = {"port": 0, "api_keys_file": str(folder / _NAME / "keys"), "tls": tls}
    system = stand.as_up(_NAME, {"gateway": gateway})
    system.address = f"https://{system.address}"
    return system


def _round(client: Child, systems: dict[str, System], samples: Samples, scale: float) -> None:
    client.ask({"do": "round", "scale": scale})
    for kind, system in systems.items():
        samples.add(kind, _SHORT.name, client.ask(system.order("requests", size=_SHORT.name)))
    for deltas in MEASURED:
        for kind, system in systems.items():
            samples.add(kind, chunk_name(deltas), chunks(client, system, deltas, scale, STREAMS))


class _Figure(NamedTuple):
    """A measurement, what of it is counted, and its row: the title, the unit of 1 / `scale` s of CPU, and the
    highest ratio."""

    what: str
    of: str
    title: str
    unit: str
    scale: float
    most: float | None = None


_FIGURES = (
    _Figure(_SHORT.name, "count", f"request, {_SHORT.name}", "CPU s/1k", 1e3),
    *(
        _Figure(chunk_name(deltas), "tokens", chunk_title(deltas), "CPU µs", 1e6, MOST_RATIO)
        for deltas in MEASURED
    ),
)


def rows_of(samples: Samples) -> list[Row]:
    """Return a row of ours for each measurement, with HAProxy as its peer."""
    return [_row(samples, each) for each in _FIGURES]


def _row(samples: Samples, figure: _Figure) -> Row:
    ours, theirs = (
        [figure.scale * each for each in samples.cpu(kind, figure.what, figure.of)]
        for kind in ("ours", "haproxy")
    )
    value, spread = median(ours)
    ratio, ratios = median([one / other for one, other in zip(ours, theirs, strict=True)])
    note = f"peer: haproxy with TLS, the median of {len(ours)} rounds' ratios"
    if figure.of == "tokens":
        found = samples.of("ours", figure.what)
        rate = statistics.median(each["tokens"] / each["wall_s"] for each in found)
        note = f"{STREAMS} streams × {rate / STREAMS:.0f} of {TOKENS_PER_S:.0f} tok/s; {note}"
    return Row(
        f"{BEGINNING}{figure.title}",
        value,
        figure.unit,
        "lower",
        peer=median(theirs)[0],
        ratio=ratio,
        target_ratio=figure.most,
        spread=spread,
        note=f"{note}, {ratios[0]:.2f} to {ratios[1]:.2f}",
    )
