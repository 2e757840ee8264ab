"""A process's certificate: an unusable one is refused with the reason, a newer one is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from kvasir.core.errors import ConfigError
from kvasir.wire.tls import MAX_FILE_BYTES, TlsFiles, TlsNames, TlsPaths
from kvasir_platform.cluster.certificates import Authority

NOW = 1_800_000_000.0
NAMES = TlsNames("kvasir.local", "shop")
URI, DNS = NAMES.worker("decode"), NAMES.worker_dns("decode")
OURS = Authority.make("ours", NOW - 9999, NOW + 9999)
FOREIGN = Authority.make("foreign", NOW - 9999, NOW + 9999)


def certified(
    by: Authority = OURS, uri: str = URI, dns: str = DNS, since: float = -100, until: float = 100
) -> bytes:
    return by.certify(uri, dns, NOW + since, NOW + until)


class Disk:
    """The files of one process, and its clock."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.own, self.now = folder / "ca.pem", folder / "own.pem", NOW
        self.key = self.own
        self.ca.write_bytes(OURS.pem)
        self.own.write_bytes(certified())

    def files(self) -> TlsFiles:
        return TlsFiles(TlsPaths(self.ca, self.own, self.key), uri=URI, dns=DNS, wall_time=lambda: self.now)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def _locked_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


def _separate_key(disk: Disk, text: bytes) -> None:
    disk.key = disk.own.with_name("key.pem")
    disk.key.write_bytes(text)


BAD: dict[str, tuple[Callable[[Disk], object], str]] = {
    "no certificate": (lambda d: d.own.unlink(), "own.pem cannot be read: No such file"),
    "no authority": (lambda d: d.ca.unlink(), "ca.pem cannot be read"),
    "half a certificate": (
        lambda d: d.own.write_bytes(certified()[:-80]),
        "own.pem holds no whole PEM certificate",
    ),
    "no PEM": (lambda d: d.ca.write_bytes(b"\0" * 99), "ca.pem holds no whole PEM certificate"),
    "a huge file": (lambda d: d.ca.write_bytes(b"x" * (MAX_FILE_BYTES + 1)), "larger than 1048576 bytes"),
    "half a key": (lambda d: _separate_key(d, b"-----BEGIN PRIVATE KEY-----\nMIG"), "no whole PEM private"),
    "a locked key": (lambda d: _separate_key(d, _locked_key()), "locked by a passphrase"),
    "another's key": (lambda d: _separate_key(d, certified()), "key.pem is not the key of .*own.pem"),
    "another pool": (
        lambda d: d.own.write_bytes(certified(uri=NAMES.worker("prefill"))),
        f"worker/prefill.*and this process is {URI}",
    ),
    "another host": (
        lambda d: d.own.write_bytes(certified(dns="example.org")),
        "example.org, and this process is",
    ),
    "a foreign authority": (
        lambda d: d.own.write_bytes(certified(FOREIGN)),
        "certified by CN=foreign .*ca.pem does not hold",
    ),
    "expired": (lambda d: d.own.write_bytes(certified(until=-1)), "expired at 2027-01-15T07:59:59"),
    "of tomorrow": (lambda d: d.own.write_bytes(certified(since=50)), "not valid before"),
}


@pytest.mark.parametrize(("spoil", "said"), BAD.values(), ids=BAD)
def test_files_that_could_never_work_are_refused_with_the_reason(
    disk: Disk, spoil: Callable[[Disk], object], said: str
) -> None:
    spoil(disk)
    with pytest.raises(ConfigError, match=said) as caught:
        disk.files()
    assert ";" in caught.value.message or "PEM only" in caught.value.message


def test_a_changed_certificate_is_taken_up_and_an_unchanged_one_is_not_read_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = disk.files()
    first = files.current()
    disk.own.write_bytes(certified())
    second = files.current()
    assert second.chain != first.chain
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("read without need"))
    assert files.current() is second


def test_a_bad_change_keeps_the_last_good_certificate_and_is_logged_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    files = disk.files()
    good = files.current()
    caplog.set_level(logging.ERROR)
    disk.own.write_bytes(certified()[:-80])
    assert all(files.current() is good for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "keeping the last valid certificate" in caplog.text
    disk.own.unlink()
    assert files.current() is good
    disk.own.write_bytes(newer := certified())
    assert files.current().chain == newer


def test_a_certificate_that_expires_while_it_is_in_use_is_known_to_be_invalid(disk: Disk) -> None:
    files = disk.files()
    assert files.invalid() == ""
    disk.now = NOW + 101
    assert "own.pem expired at" in files.invalid()
    disk.now = NOW - 101
    assert "is not valid before" in files.invalid()


def test_a_chain_over_an_intermediate_authority_is_good(disk: Disk) -> None:
    disk.own.write_bytes(certified(FOREIGN) + FOREIGN.pem)
    assert disk.files().current().chain.endswith(FOREIGN.pem)
