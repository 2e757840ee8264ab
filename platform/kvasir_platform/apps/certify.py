"""Certificates of a deployment in a cluster without cert-manager: a Job creates them, a CronJob renews them.

    python -m kvasir_platform.apps.certify --deployment kvasir.yaml --secret NAME --authority NAME

Two Secrets exist before it runs, so that it needs no right to create any: one with the files of routers and
workers, of which each mounts its own, and one with the authority's key, which no pod mounts. An authority
that nears its end announces its successor one run before that signs, so that every peer accepts both when
certificates change.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from kvasir.config.load.loader import load
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.wire.tls import TlsNames
from kvasir_platform.apps.common.peer_tls import tls_names
from kvasir_platform.cluster.certificates import CA_FILE, ROUTER_FILE, Authority, worker_file
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.objects import KubernetesObjects

SIGNER, NEXT, BEFORE = "signer.pem", "next.pem", "before.pem"
"""Keys of the authority's Secret: the signing authority, its successor, and the authorities of unexpired
certificates."""
AUTHORITY_LIVES = 10.0
RENEW_AT = 2 / 3
BACKDATE_S = 300.0
# The kubelet updates a changed Secret in all pods within minutes.
KNOWN_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Made:
    """The desired contents of the two Secrets."""

    authority: dict[str, bytes]
    roles: dict[str, bytes]


def renewed(
    kept: Mapping[str, bytes], names: TlsNames, pools: Sequence[str], *, life_s: float, now: float
) -> Made:
    """Return certificates for every role, valid for `life_s` seconds from `now` (since the epoch). `kept` is
    the content of the authority's Secret, which may be empty. Raises ConfigError if it is not an authority.
    """
    signer, following = _authority(kept, SIGNER), _authority(kept, NEXT)
    before = kept.get(BEFORE, b"")
    if signer is None:
        signer = _make(names, now, life_s)
    elif following is not None and _age_s(following, now) >= KNOWN_AFTER_S:
        signer, following, before = following, None, signer.pem
    elif following is None and _age_s(signer, now) > life_s * AUTHORITY_LIVES * RENEW_AT:
        following = _make(names, now, life_s)
    authority = {SIGNER: _pem(signer), BEFORE: before}
    if following is not None:
        authority[NEXT] = _pem(following)
    accepted = signer.pem + (following.pem if following is not None else b"") + before
    roles = {ROUTER_FILE: (names.router, names.router_dns)}
    roles |= {worker_file(pool): (names.worker(pool), names.worker_dns(pool)) for pool in pools}
    certified = {
        file: signer.certify(uri, dns, now - BACKDATE_S, now + life_s) for file, (uri, dns) in roles.items()
    }
    return Made(authority, {CA_FILE: accepted, **certified})


class Secrets:
    """The Secrets of the pod's own namespace, one request each. Every method raises ConfigError."""

    def __init__(self, access: Access) -> None:
        self._objects = KubernetesObjects(access, "/api/v1", "secrets")

    def read(self, name: str) -> tuple[dict[str, bytes], str]:
        """Return its data, and its version."""
        answer = _granted("GET", name, *self._objects.get(name))
        data = {key: base64.b64decode(value) for key, value in (answer.get("data") or {}).items()}
        return data, answer["metadata"]["resourceVersion"]

    def write(self, name: str, data: Mapping[str, bytes], *, was: Mapping[str, bytes], version: str) -> None:
        """Replace its data, if it has not changed since it was read as `was` at `version`."""
        values: dict[str, str | None] = {key: None for key in was if key not in data}
        values |= {key: base64.b64encode(value).decode("ascii") for key, value in data.items()}
        change = {"metadata": {"resourceVersion": version}, "data": values}
        _granted("PATCH", name, *self._objects.patch(name, change))


def _granted(method: str, name: str, status: int, answer: dict[str, Any]) -> dict[str, Any]:
    if status != http.client.OK:
        raise ConfigError(
            f"the API server refused to {method} the Secret {name} ({status}): "
            f"{answer.get('message', '')}; the chart gives this pod the right to get and patch it"
        )
    return answer


def run(
    secrets: Secrets,
    names: TlsNames,
    pools: Sequence[str],
    *,
    authority: str,
    secret: str,
    life_s: float,
    now: float,
) -> None:
    """Renew both Secrets. Raises ConfigError, and is safe to repeat: only the authority can have been written
    without the rest."""
    kept, kept_version = secrets.read(authority)
    held, held_version = secrets.read(secret)
    made = renewed(kept, names, pools, life_s=life_s, now=now)
    # First, so that nothing is ever signed by a key that is lost.
    secrets.write(authority, made.authority, was=kept, version=kept_version)
    secrets.write(secret, made.roles, was=held, version=held_version)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-certify", description="Certify routers and workers.")
    parser.add_argument("--deployment", type=Path, required=True, help="kvasir.yaml")
    parser.add_argument("--secret", required=True, help="Secret that routers and workers read")
    parser.add_argument("--authority", required=True, help="Secret with the authority's key")
    parser.add_argument("--life-h", type=float, default=720.0, help="how long certificates are valid")
    args = parser.parse_args(argv)
    try:
        deployment = load(args.deployment)
        folder = Path(deployment.discovery.kubernetes.credentials_dir)
        secrets = Secrets(Access.in_cluster(folder, os.environ))
        pools = [pool.name for pool in deployment.pools]
        run(
            secrets,
            tls_names(deployment),
            pools,
            authority=args.authority,
            secret=args.secret,
            life_s=args.life_h * 3600,
            now=time.time(),
        )
    except KvasirError as error:
        sys.stderr.write(f"kvasir-certify: {error.message}\n")
        return 1
    sys.stdout.write(f"certified the router and {', '.join(pools)} for {args.life_h:g} h\n")
    return 0


def _make(names: TlsNames, now: float, life_s: float) -> Authority:
    return Authority.make(f"kvasir {names.deployment}", now - BACKDATE_S, now + life_s * AUTHORITY_LIVES)


def _authority(kept: Mapping[str, bytes], key: str) -> Authority | None:
    text = kept.get(key)
    if not text:
        return None
    try:
        private = load_pem_private_key(text, None)
        certificate = x509.load_pem_x509_certificate(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{key} of the authority's Secret is not a key with its certificate: {error}; empty the Secret "
            "for another authority, and restart routers and workers together"
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key} of the authority's Secret is not an elliptic-curve key")
    return Authority(private, certificate)


def _pem(authority: Authority) -> bytes:
    secret = authority.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + authority.pem


def _age_s(authority: Authority, now: float) -> float:
    return now - authority.certificate.not_valid_before_utc.timestamp() - BACKDATE_S


if __name__ == "__main__":
    sys.exit(main())
