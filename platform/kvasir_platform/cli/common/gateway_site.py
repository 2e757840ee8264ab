"""The address of a gateway, and how it is verified: plain HTTP or HTTPS, and the trusted certificates.

Commands send an API key, and show the response as the truth. So an HTTPS gateway is verified before a byte is
sent, and there is no option to skip that.
"""

from __future__ import annotations

import http.client
import re
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.local.runtime_dir import DeploymentState

_ADDRESS = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?)"
    r"(?::(?P<port>\d{1,5}))?/?"
)
_PORTS = {"http": 80, "https": 443}
_EXPIRED = 10
_NO_ISSUER = frozenset({2, 18, 19, 20, 21})
_OTHER_NAME = frozenset({62, 64})
_CUT = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, http.client.BadStatusLine)


class AnotherCertificateError(UpstreamError):
    """A gateway of this machine presents another certificate than its file holds."""


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway. `authority` is its `host:port`.

    With HTTPS, `pinned` is the file whose first certificate it has to present, whatever names and dates that
    has: only the holder of its key can. Without `pinned`, its certificate has to be issued for its host by an
    authority in `ca_file`, or by one of the system's. `cert_file` and `key_file` are the client's own, in one
    file if `key_file` is None.
    """

    authority: str
    scheme: Literal["http", "https"] = "http"
    pinned: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def of_state(cls, state: DeploymentState) -> Self:
        """Return the gateway of a deployment on this machine, which has an address."""
        if not state.certificate:
            return cls(reachable(state.address))
        return cls(
            reachable(state.address),
            "https",
            pinned=state.certificate,
            cert_file=state.operator_certificate or None,
        )

    @property
    def url(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.authority}"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to the verified gateway, for the caller to close. Raises UpstreamError for an
        unexpected certificate, OSError without an answer, and ConfigError for files that cannot be used."""
        if self.scheme == "http":
            return http.client.HTTPConnection(self.authority, timeout=timeout_s)
        connection = http.client.HTTPSConnection(
            self.authority, timeout=timeout_s, context=self.tls_context()
        )
        try:
            connection.connect()
            if self.pinned is not None:
                self._check_pinned(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def explain(self, error: Exception) -> str:
        """Explain why a call failed, and what to do."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._mistrust(error)
        if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return f"speaks no TLS; if it serves plain HTTP, name it http://{self.authority}"
        cut = isinstance(error, _CUT)
        if cut and self.scheme == "http":
            return f"cut the connection; if it serves HTTPS, name it https://{self.authority}"
        if cut or (isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")):
            if self.cert_file is None:
                return "cut the connection; if it asks clients for certificates, name yours with --cert FILE"
            return f"cut the connection; it may not accept the certificate in {self.cert_file}"
        return f"does not answer: {error or type(error).__name__}"

    def tls_context(self) -> ssl.SSLContext:
        """How the gateway is verified; a pinned certificate is compared after the handshake. Raises
        ConfigError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise ConfigError(
                f"--cacert {self.ca_file} cannot be used: {error.strerror or error}; name a file of PEM "
                "certificates"
            ) from error
        if self.pinned is not None:
            # The handshake still proves possession of the key; the certificate is compared afterwards.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            try:
                # The password: OpenSSL would prompt for it on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: b"")
            except OSError as error:
                raise ConfigError(
                    f"the client's certificate {self.cert_file} cannot be used: {error.strerror or error}; "
                    "name PEM files with --cert and --key, the key without a passphrase"
                ) from error
        return context

    def _check_pinned(self, connection: http.client.HTTPSConnection) -> None:
        # Costs 0.1 s, which calls over plain HTTP do not need.
        from cryptography.hazmat.primitives.serialization import Encoding

        from kvasir.wire.tls import certificates_in, read_pem

        path = Path(self.pinned or "")
        own = certificates_in(path, read_pem(path))[0].public_bytes(Encoding.DER)
        if connection.sock.getpeercert(binary_form=True) != own:
            raise AnotherCertificateError(
                f"the gateway at {self.authority} shows another certificate than {path} holds: either it "
                "keeps its last good one, and router.log says why, or another server answers at this address"
            )

    def _mistrust(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code == _EXPIRED:
            return "shows a certificate that has expired; renew its gateway.tls.cert_file"
        if error.verify_code in _OTHER_NAME:
            return (
                "shows a certificate of another name; name the gateway in --address as its certificate does "
                f"({error.verify_message})"
            )
        if error.verify_code in _NO_ISSUER:
            where = "the system trusts" if self.ca_file is None else f"{self.ca_file} holds"
            return (
                f"shows a certificate of no authority that {where}; name a file with its authority's "
                "certificate: --cacert FILE"
            )
        return f"shows a certificate that cannot be trusted: {error.verify_message}"


def read_address(address: str) -> Site:
    """Parse `--address`: `host:port`, or a URL of http or https. Raises ConfigError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"] or 1) not in range(1, 65536):
        raise ConfigError(
            f"--address {address!r}: name HOST:PORT, http://HOST:PORT or https://HOST:PORT, without a path"
        )
    secure = found["scheme"] == "https"
    port = int(found["port"] or _PORTS[found["scheme"] or "http"])
    return replace(Site(f"{found['host']}:{port}"), scheme="https" if secure else "http")


def reachable(address: str) -> str:
    """Return the address by which a client on this machine reaches a gateway that binds `address`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host in ("0.0.0.0", ""):  # noqa: S104 - compared
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
