"""The deployment spec's part about trust: how routers and workers prove to each other who they are."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Spec

_FILES = ("ca_file", "cert_file", "key_file")

TrustDomain = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=100)
]


class TlsSpec(Spec):
    """Mutual TLS between routers and workers. A router's certificate carries the URI
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/router`; a worker's carries
    `spiffe://TRUST_DOMAIN/DEPLOYMENT/worker/POOL` and the DNS name `POOL.worker.DEPLOYMENT.TRUST_DOMAIN`.
    Files are read again when they change, and no session ends for it."""

    mode: Literal["auto", "files", "off"] = "auto"
    """`auto` uses the files that are named. Where none is, `kvasir up` makes certificates and renews
    them, and a router or worker that is started by itself speaks plain text on loopback and does not start
    beyond it. `files` never speaks plain text; `off` always does."""
    directory: str | None = None
    """Folder with `ca.pem`, `router.pem` and a `worker-POOL.pem` for each pool; the last two hold a private
    key and its certificate chain. It stands in place of the three files below."""
    ca_file: str | None = None
    """PEM certificates of the authorities that peers may be certified by. While authorities change, name
    the old and the next one."""
    cert_file: str | None = None
    """PEM certificate chain of the process that reads this, its own certificate first."""
    key_file: str | None = None
    """PEM private key of that certificate, without a passphrase."""
    trust_domain: TrustDomain = "kvasir.local"
    """What the names in certificates begin or end with."""
    rotate_h: float = Field(default=24.0, ge=0.1, le=8760)
    """How long certificates that `kvasir up` makes are valid; they are renewed after two thirds of it."""

    @property
    def named(self) -> bool:
        """Whether the spec says where the certificates are."""
        return self.directory is not None or self.cert_file is not None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = [field for field in _FILES if getattr(self, field) is not None]
        if self.mode == "off" and (given or self.directory):
            raise ValueError("mode off uses no certificates: remove the files, or set mode: files")
        if self.directory is not None and given:
            raise ValueError(f"directory holds all certificates already: remove it, or {', '.join(given)}")
        if given and len(given) < len(_FILES):
            lacking = [field for field in _FILES if field not in given]
            raise ValueError(f"{lacking[0]} is missing: name {' and '.join(lacking)} beside {given[0]}")
        if self.mode == "files" and not self.named:
            raise ValueError("mode files needs directory, or ca_file, cert_file and key_file; name them")
        return self
