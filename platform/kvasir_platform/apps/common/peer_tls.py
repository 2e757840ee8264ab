"""The certificate that a process presents to its peers, from the deployment spec and the process's role.

Plain text is used if the spec says `off`, and on loopback if it says `auto` and names no certificate; it is
never a fallback after an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kvasir.config.spec.deployment import Deployment, is_loopback
from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir.wire.tls import TlsFiles, TlsNames, TlsPaths
from kvasir_platform.cluster.certificates import (
    CA_FILE,
    ROUTER_FILE,
    CertificateFolder,
    keep_fresh,
    worker_file,
)

log = logging.getLogger(__name__)


def tls_names(deployment: Deployment) -> TlsNames:
    """Return the names in the deployment's certificates."""
    return TlsNames(deployment.tls.trust_domain, deployment.name)


def router_files(deployment: Deployment) -> TlsFiles | None:
    """Return a router's certificate; None for plain text. Raises ConfigError for invalid certificates, and if
    workers on other machines would be reached in plain text."""
    hosts = [endpoint.rpartition(":")[0].partition("=")[2] for endpoint in deployment.discovery.endpoints]
    hosts = hosts if deployment.discovery.kind == "static" else [deployment.worker.host]
    names = tls_names(deployment)
    return _files(deployment, hosts, ROUTER_FILE, uri=names.router, dns=names.router_dns)


def cell_files(deployment: Deployment) -> TlsFiles | None:
    """Return a router's certificate for links with other cells; None for plain text, on loopback. Raises
    ConfigError for invalid certificates, and if a cell on another machine would be reached in plain text."""
    hosts = [] if deployment.regions is None else deployment.regions.hosts
    names = tls_names(deployment)
    return _files(deployment, hosts, ROUTER_FILE, uri=names.router, dns=names.router_dns)


def worker_files(deployment: Deployment, pool: str) -> TlsFiles | None:
    """Return a worker's certificate; None for plain text. Raises ConfigError for invalid certificates, and if
    plain text would be open to the network."""
    names = tls_names(deployment)
    hosts = [deployment.worker.host]
    return _files(deployment, hosts, worker_file(pool), uri=names.worker(pool), dns=names.worker_dns(pool))


def with_tls_dir(deployment: Deployment, folder: Path | None) -> Deployment:
    """Return the deployment with its certificates in `folder`; unchanged for None."""
    if folder is None:
        return deployment
    given = {"mode": "files", "directory": str(folder.absolute())}
    files = {"ca_file": None, "cert_file": None, "key_file": None}
    return deployment.model_copy(update={"tls": deployment.tls.model_copy(update=given | files)})


def certified(
    deployment: Deployment, folder: Path, clock: Clock
) -> tuple[Deployment, Callable[[], Coroutine[Any, Any, NoReturn]] | None]:
    """Return the deployment for all of its processes on one machine, and what renews its certificates while
    they run: created in `folder`, unless the deployment names its own or uses none. Raises ConfigError if
    they cannot be written, and if its own are not valid for each role."""
    tls = deployment.tls
    if tls.cert_file is not None:
        raise ConfigError(
            "tls.cert_file: one certificate cannot be the router's and the workers' too, and `kvasir up` "
            "starts them all; name a tls.directory, or no files, and certificates are made"
        )
    if tls.directory is not None:
        router_files(deployment)
        for pool in deployment.pools:
            worker_files(deployment, pool.name)
    if tls.mode != "auto" or tls.named:
        return deployment, None
    pools = [pool.name for pool in deployment.pools]
    names, life_s = tls_names(deployment), tls.rotate_h * 3600
    made = CertificateFolder(folder, names, pools, life_s=life_s, wall_time=time.time)
    due = made.renew()
    return with_tls_dir(deployment, folder), partial(keep_fresh, made, due, clock=clock, wall_time=time.time)


def _files(deployment: Deployment, hosts: list[str], file: str, *, uri: str, dns: str) -> TlsFiles | None:
    tls = deployment.tls
    exposed = [host for host in hosts if not is_loopback(host.strip("[]"))]
    if tls.directory is not None:
        folder = Path(tls.directory)
        return TlsFiles(
            TlsPaths(folder / CA_FILE, folder / file, folder / file), uri=uri, dns=dns, wall_time=time.time
        )
    if tls.ca_file is not None and tls.cert_file is not None and tls.key_file is not None:
        paths = TlsPaths(Path(tls.ca_file), Path(tls.cert_file), Path(tls.key_file))
        return TlsFiles(paths, uri=uri, dns=dns, wall_time=time.time)
    if tls.mode == "off":
        if exposed:
            log.warning("tls.mode is off: prompts, answers and tokens to %s travel in plain text", exposed[0])
        return None
    if exposed:
        raise ConfigError(
            f"tls: {exposed[0]} is on another machine, and no certificate is named; set tls.directory, or "
            "tls.ca_file, cert_file and key_file, or pass --tls-dir; tls.mode: off would speak plain text"
        )
    log.info("no certificates are named: routers and workers speak plain text on loopback")
    return None
