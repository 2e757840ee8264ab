"""Creates the certificates of one deployment, and renews them before they expire.

The authority's private key is in this process's memory only: a reader of the folder can act in the roles
whose files it reads, and cannot issue certificates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir.wire.tls import TlsNames

log = logging.getLogger(__name__)

CA_FILE = "ca.pem"
ROUTER_FILE = "router.pem"
# An authority is valid for this many certificate lifetimes; its successor is announced long before its end.
_CA_LIVES = 10.0
_RENEW_AT = 2 / 3
# Clocks of two machines differ.
_BACKDATE_S = 300.0
# The sleep's clock may stop while the machine is suspended; certificates still expire.
_LOOK_S = 60.0


def worker_file(pool: str) -> str:
    """Return the file name of one pool's key and certificate."""
    return f"worker-{pool}.pem"


@dataclass(frozen=True, slots=True)
class Authority:
    """A key that signs certificates. Times are seconds since the epoch."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, name: str, not_before: float, not_after: float) -> Self:
        """Create an authority that is valid between the two times."""
        key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
        # Authorities that replace each other differ in name, so that a chain is built with the right one.
        common = f"{name} {serial & 0xFFFFFFFF:08x}"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])
        builder = _builder(subject, key.public_key(), not_before, not_after)
        certificate = (
            builder.subject_name(subject)
            .serial_number(serial)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, SHA256())
        )
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        """Return the authority certificates that peers need to accept its certificates."""
        return self.certificate.public_bytes(Encoding.PEM)

    def certify(self, uri: str, dns: str, not_before: float, not_after: float) -> bytes:
        """Return a private key and its certificate for one role, as one PEM text."""
        key = ec.generate_private_key(ec.SECP256R1())
        own = key.public_key()
        names = [x509.DNSName(dns), x509.UniformResourceIdentifier(uri)]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(self.certificate.subject, own, not_before, not_after)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            builder.subject_name(x509.Name([]))
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            # Critical, because the subject is empty.
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(signer, critical=False)
            .sign(self.key, SHA256())
        )
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return secret + certificate.public_bytes(Encoding.PEM)


def self_signed(name: str, not_before: float, not_after: float) -> bytes:
    """Return a private key and its self-signed certificate, as one PEM text, for a client; it signs no
    others. Times are seconds since the epoch."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        _builder(subject, key.public_key(), not_before, not_after)
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + certificate.public_bytes(Encoding.PEM)


class CertificateFolder:
    """The files of one deployment: `ca.pem`, and one for each role.

    Each file is replaced atomically, the authorities' first, so that a reader always finds a matching set.
    `life_s` is the lifetime of a certificate; `wall_time` returns seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        names: TlsNames,
        pools: Sequence[str],
        *,
        life_s: float,
        wall_time: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._roles: Mapping[str, tuple[str, str]] = {
            ROUTER_FILE: (names.router, names.router_dns),
            **{worker_file(pool): (names.worker(pool), names.worker_dns(pool)) for pool in pools},
        }
        self._name = f"kvasir {names.deployment}"
        self._life_s = life_s
        self._wall_time = wall_time
        self._signer: Authority | None = None
        self._next: Authority | None = None

    def renew(self, *, new_authority: bool = False) -> float:
        """Renew the certificate of every role. Return when to do so again (seconds since the epoch).

        When the authority nears its end, or with `new_authority`, a successor is announced beside it, and
        signs from the next renewal on: by then every peer accepts it. Raises ConfigError if the folder cannot
        be written.
        """
        now = self._wall_time()
        signer, following, before = self._signer, self._next, None
        if signer is None:
            signer = self._make(now)
        elif following is not None:
            signer, following, before = following, None, signer
        elif new_authority or _age(signer, now) > self._life_s * _CA_LIVES * _RENEW_AT:
            following = self._make(now)
        accepted = [one for one in (signer, following, before) if one is not None]
        try:
            self._write(signer, accepted, now)
        except OSError as error:
            raise ConfigError(
                f"certificates cannot be written to {self._folder}: {error.strerror}; make room there, or "
                "name another folder in KVASIR_HOME"
            ) from error
        self._signer, self._next = signer, following
        return now + self._life_s * _RENEW_AT

    def _make(self, now: float) -> Authority:
        return Authority.make(self._name, now - _BACKDATE_S, now + self._life_s * _CA_LIVES)

    def _write(self, signer: Authority, accepted: Sequence[Authority], now: float) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        _replace(self._folder / CA_FILE, b"".join(one.pem for one in accepted))
        for file, (uri, dns) in self._roles.items():
            _replace(self._folder / file, signer.certify(uri, dns, now - _BACKDATE_S, now + self._life_s))


async def keep_fresh(
    folder: CertificateFolder, due: float, *, clock: Clock, wall_time: Callable[[], float]
) -> NoReturn:
    """Renew at `due` (seconds since the epoch), and again whenever it is due. A failed renewal is logged and
    retried a minute later: a third of each lifetime is left for that."""
    while True:
        await clock.sleep(min(max(due - wall_time(), 0.0), _LOOK_S))
        if wall_time() < due:
            continue
        try:
            due = folder.renew()
        except ConfigError as error:
            log.error("%s", error.message)
            await clock.sleep(_LOOK_S)


def _age(authority: Authority, now: float) -> float:
    return now - authority.certificate.not_valid_before_utc.timestamp() - _BACKDATE_S


def _builder(
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    not_before: float,
    not_after: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .public_key(key)
        .not_valid_before(datetime.fromtimestamp(not_before, UTC))
        .not_valid_after(datetime.fromtimestamp(not_after, UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    partial.replace(path)
