"""Certificates of a deployment: private on disk, renewed in time, with an authority that is rotated without
downtime."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import pytest
from cryptography import x509
from tests.kit.clocks import SteppedClock

from kvasir.core.errors import ConfigError
from kvasir.wire.tls import TlsFiles, TlsNames, TlsPaths
from kvasir_platform.cluster.certificates import CertificateFolder, keep_fresh

NAMES = TlsNames("kvasir.local", "shop")
LIFE_S = 900.0


STARTED = 1_800_000_000.0  # a wall time


def make(folder: Path, time: SteppedClock) -> CertificateFolder:
    return CertificateFolder(folder, NAMES, ["decode"], life_s=LIFE_S, wall_time=lambda: time.at)


def router(folder: Path, time: SteppedClock) -> TlsFiles:
    paths = TlsPaths(folder / "ca.pem", folder / "router.pem", folder / "router.pem")
    return TlsFiles(paths, uri=NAMES.router, dns=NAMES.router_dns, wall_time=lambda: time.at)


def authorities(folder: Path) -> list[str]:
    found = x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())
    return [one.subject.rfc4514_string() for one in found]


def signer(folder: Path, file: str = "router.pem") -> str:
    return x509.load_pem_x509_certificate((folder / file).read_bytes()).issuer.rfc4514_string()


def test_the_folder_is_private_and_holds_a_good_certificate_for_each_role(tmp_path: Path) -> None:
    time, folder = SteppedClock(STARTED), tmp_path / "tls"
    assert make(folder, time).renew() == time.at + LIFE_S * 2 / 3
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "router.pem", "worker-decode.pem"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert b"PRIVATE" not in (folder / "ca.pem").read_bytes()
    assert router(folder, time).current().not_after == time.at + LIFE_S


def test_a_successor_is_announced_one_renewal_before_it_signs(tmp_path: Path) -> None:
    time = SteppedClock(STARTED)
    folder = make(tmp_path, time)
    folder.renew()
    (first,) = authorities(tmp_path)
    folder.renew(new_authority=True)
    announced = authorities(tmp_path)
    assert announced[0] == first == signer(tmp_path) == signer(tmp_path, "worker-decode.pem")
    folder.renew()
    assert authorities(tmp_path) == announced[::-1]
    assert signer(tmp_path) == signer(tmp_path, "worker-decode.pem") == announced[1]
    folder.renew()
    assert authorities(tmp_path) == announced[1:]


def test_certificates_are_valid_at_every_moment_of_a_long_run_and_authorities_change(tmp_path: Path) -> None:
    time = SteppedClock(STARTED)
    folder = make(tmp_path, time)
    due, seen = folder.renew(), set()
    files = router(tmp_path, time)
    for _ in range(60):
        time.at = due
        assert files.invalid() == ""
        due = folder.renew()
        seen |= set(authorities(tmp_path))
        assert len(authorities(tmp_path)) <= 2
        ca = x509.load_pem_x509_certificates((tmp_path / "ca.pem").read_bytes())[0]
        assert ca.not_valid_after_utc.timestamp() >= files.current().not_after
    assert len(seen) > 5


async def test_renewal_comes_in_time_again_and_again_also_after_a_suspension(tmp_path: Path) -> None:
    time = SteppedClock(STARTED)
    folder = make(tmp_path, time)
    due = folder.renew()
    files = router(tmp_path, time)
    first = files.current()
    keeping = asyncio.ensure_future(keep_fresh(folder, due, clock=time, wall_time=lambda: time.at))
    while files.current() is first:
        await asyncio.sleep(0)
    assert due <= time.at <= due + 60
    second, time.at = files.current(), time.at + LIFE_S
    while files.current() is second:
        await asyncio.sleep(0)
    assert files.invalid() == ""
    assert max(time.slept) <= 60
    keeping.cancel()


async def test_a_folder_that_cannot_be_written_is_tried_again_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = SteppedClock(STARTED)
    folder = make(tmp_path, time)
    due = folder.renew()
    before = authorities(tmp_path)
    files = router(tmp_path, time)
    good = files.current()
    caplog.set_level(logging.ERROR)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"No space left on device; make room there"):
            folder.renew(new_authority=True)
        keeping = asyncio.ensure_future(keep_fresh(folder, due, clock=time, wall_time=lambda: time.at))
        while not caplog.records:
            await asyncio.sleep(0)
        assert files.current() is good
    while files.current() is good:
        await asyncio.sleep(0)
    keeping.cancel()
    assert authorities(tmp_path) == before
