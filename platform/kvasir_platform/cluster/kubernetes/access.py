"""Address and credentials of the API server, as a pod gets them.

Apart from `api`, so that a program that only needs these does not import the Kubernetes client.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.core.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Access:
    """Address of the API server, and the service account's folder with `token`, `ca.crt` and `namespace`.
    Files are read at each use, because the kubelet replaces them."""

    host: str
    port: int
    folder: Path

    @classmethod
    def in_cluster(cls, folder: Path, environ: Mapping[str, str]) -> Access:
        """Access by the variables that Kubernetes sets in every container. Raises ConfigError outside a
        cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                "discovery: kubernetes works inside a cluster only: KUBERNETES_SERVICE_HOST and "
                "KUBERNETES_SERVICE_PORT are not set; run the router in a pod, or choose another kind"
            )
        return cls(host, int(port), folder)

    def namespace(self) -> str:
        """Return the pod's namespace. Raises ConfigError if the file cannot be read."""
        try:
            return self._read("namespace")
        except OSError as error:
            raise ConfigError(
                f"discovery: kubernetes: the pod's namespace cannot be read: {error}; set "
                "discovery.kubernetes.namespace, or mount the service account"
            ) from error

    def token(self) -> str:
        """Return the service account's token. Raises OSError."""
        token = self._read("token")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise OSError(f"{self.folder / 'token'} does not hold one token")
        return token

    def context(self) -> ssl.SSLContext:
        """Return a TLS context that verifies the API server by `ca.crt`. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self._read("ca.crt"))
        return context

    def _read(self, name: str) -> str:
        with (self.folder / name).open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES).strip()
