"""The certificates of one process: the names that they must contain, and reloading from disk.

Both ends of a session read their files through this module, so that an unusable certificate is refused at
start with the reason, and a replaced one is loaded without a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvasir.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsNames:
    """The names in certificates of one deployment. Workers check the URI. For routers, gRPC checks the DNS
    name, because its Python API does not expose the peer's certificate to clients."""

    trust_domain: str
    deployment: str

    @property
    def router(self) -> str:
        """The URI of a router."""
        return f"spiffe://{self.trust_domain}/{self.deployment}/router"

    def worker(self, pool: str) -> str:
        """The URI of a worker of `pool`."""
        return f"spiffe://{self.trust_domain}/{self.deployment}/worker/{pool}"

    @property
    def router_dns(self) -> str:
        """The DNS name of a router, which is never dialed."""
        return f"router.{self.deployment}.{self.trust_domain}"

    def worker_dns(self, pool: str) -> str:
        """The DNS name of a worker of `pool`, which routers check regardless of its address."""
        return f"{pool}.worker.{self.deployment}.{self.trust_domain}"


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files. `cert` and `key` can be one file."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class KeyMaterial:
    """Matching PEM texts, and the validity of the certificate (seconds since the epoch)."""

    ca: bytes
    chain: bytes
    key: bytes
    not_before: float
    not_after: float


class TlsFiles:
    """The certificate of one process, which must be for `uri` and `dns`.

    The files are read at start and whenever one of them changes. If a changed set is invalid, it is logged
    once and the last valid set remains in use. Thread-safe. `wall_time` returns seconds since the epoch.
    Raises ConfigError if the first set is invalid.
    """

    def __init__(self, paths: TlsPaths, *, uri: str, dns: str, wall_time: Callable[[], float]) -> None:
        self._paths = paths
        self._uri = uri
        self._dns = dns
        self._wall_time = wall_time
        self._lock = threading.Lock()
        self._seen = _signature(paths)
        self._material = self._load()

    def current(self) -> KeyMaterial:
        """Return the latest valid set. Costs three stat calls, and a reload if a file has changed."""
        with self._lock:
            signature = _signature(self._paths)
            if signature != self._seen:
                self._seen = signature
                try:
                    self._material = self._load()
                except ConfigError as error:
                    log.error("keeping the last valid certificate: %s", error.message)
            return self._material

    def invalid(self) -> str:
        """Return why peers reject the certificate at this time, or "" if it is valid."""
        material = self.current()
        return validity_problem(self._paths.cert, material.not_before, material.not_after, self._wall_time())

    def _load(self) -> KeyMaterial:
        ca_path, cert_path, key_path = self._paths.ca, self._paths.cert, self._paths.key
        # The authorities are read last: a rotation writes them first, so the certificate never precedes its
        # authority.
        chain, key, ca = read_pem(cert_path), read_pem(key_path), read_pem(ca_path)
        certificates, authorities = certificates_in(cert_path, chain), certificates_in(ca_path, ca)
        own = certificates[0]
        check_key(own, cert_path, key, key_path)
        _check_names(own, cert_path, self._uri, self._dns)
        if not any(_issued(own, issuer) for issuer in (*certificates[1:], *authorities)):
            issuer_name = own.issuer.rfc4514_string() or "a nameless authority"
            raise ConfigError(
                f"tls: {cert_path} is certified by {issuer_name}, which {ca_path} does not hold; add that "
                "authority's certificate there, or issue another one"
            )
        not_before, not_after = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
        if problem := validity_problem(cert_path, not_before, not_after, self._wall_time()):
            raise ConfigError(f"tls: {problem}")
        return KeyMaterial(ca, chain, key, not_before, not_after)


def _signature(paths: TlsPaths) -> Signature:
    found = []
    for path in (paths.ca, paths.cert, paths.key):
        try:
            status = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def read_pem(path: Path) -> bytes:
    """Return the contents of a PEM file. Raises ConfigError if it cannot be read or is too large."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"tls: {path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"tls: {path} is larger than {MAX_FILE_BYTES} bytes; it should hold PEM only")
    return data


def certificates_in(path: Path, data: bytes) -> list[x509.Certificate]:
    """Return the certificates in `data`, the contents of `path`: at least one. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"tls: {path} holds no whole PEM certificate; write one into it") from error


def check_key(own: x509.Certificate, cert_path: Path, key: bytes, key_path: Path) -> None:
    """Raise ConfigError unless `key` is an unencrypted private key that matches `own`."""
    try:
        public = load_pem_private_key(key, None).public_key()
    except TypeError as error:
        raise ConfigError(f"tls: {key_path} is locked by a passphrase; write the key without one") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"tls: {key_path} holds no whole PEM private key; write one into it") from error
    if public != own.public_key():
        raise ConfigError(f"tls: {key_path} is not the key of {cert_path}; name files that belong together")


def certificate_problem(cert: Path, key: Path, clients: Path | None, now: float) -> str:
    """Return why a server cannot use `cert` at `now` (seconds since the epoch), or the authorities in
    `clients` to check its clients; "" if it can."""
    try:
        own = certificates_in(cert, read_pem(cert))[0]
        check_key(own, cert, read_pem(key), key)
        if clients is not None:
            certificates_in(clients, read_pem(clients))
    except ConfigError as error:
        return error.message
    begins, ends = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
    problem = validity_problem(cert, begins, ends, now)
    return f"tls: {problem}" if problem else ""


def _check_names(own: x509.Certificate, path: Path, uri: str, dns: str) -> None:
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = names.get_values_for_type(x509.DNSName)
    if uris != [uri] or dns not in hosts:
        raise ConfigError(
            f"tls: {path} is a certificate of {', '.join([*uris, *hosts]) or 'nobody'}, and this process is "
            f"{uri} ({dns}); issue one that has these as its URI and a DNS name"
        )


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def validity_problem(path: Path, not_before: float, not_after: float, now: float) -> str:
    """Return why a certificate is invalid at `now`, or "". All times are seconds since the epoch."""
    if now > not_after:
        return f"{path} expired at {_moment(not_after)}; renew it, or correct the clock"
    if now < not_before:
        return f"{path} is not valid before {_moment(not_before)}; correct the clock, or issue it anew"
    return ""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
