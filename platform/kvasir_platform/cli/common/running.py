"""The running deployments of this user, and which one a command selects."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.common.gateway_site import Site, reachable, read_address
from kvasir_platform.cluster.local.runtime_dir import (
    DeploymentState,
    RuntimeDir,
    default_base,
    deployments,
    ended,
)


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The gateway that a command line selects. None: the one of the deployment on this machine."""

    name: str | None = None
    address: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


def chosen_deployments(name: str | None) -> list[tuple[RuntimeDir, DeploymentState]]:
    """Return the deployments that run or have left files; only those named `name` if it is given."""
    found = []
    for runtime in deployments(default_base()):
        state = runtime.read()
        if state is None or (name is not None and runtime.name != name):
            continue
        if runtime.holder() is not None or not ended(state):
            found.append((runtime, state))
    return found


def chosen_one(name: str | None) -> tuple[RuntimeDir, DeploymentState] | None:
    """Return the deployment that a command selects, None if nothing runs. Raises ConfigError if several run
    and none is named."""
    found = chosen_deployments(name)
    if len(found) > 1:
        names = ", ".join(runtime.name for runtime, _ in found)
        raise ConfigError(f"several deployments run, name one of: {names}")
    return found[0] if found else None


def gateway_site(desired: GatewayAddress) -> Site:
    """Return the gateway at `desired.address`, or that of the one deployment that runs here (or has this
    name). The address of a deployment that runs here is verified as that one, unless its scheme differs.
    Raises ConfigError as above and for options that do not fit, and UpstreamError if there is no gateway.
    """
    site = _local(desired.name) if desired.address is None else _addressed(desired.address)
    if desired.key_file is not None and desired.cert_file is None:
        raise ConfigError("--key needs --cert: the certificate of that key")
    if site.scheme == "http" and (desired.ca_file or desired.cert_file):
        raise ConfigError(
            f"--cacert, --cert and --key are for HTTPS, and {site.url} is plain HTTP; name the gateway "
            f"--address https://{site.authority}"
        )
    if desired.ca_file is not None:
        site = replace(site, ca_file=desired.ca_file, pinned=None)
    if desired.cert_file is not None:
        site = replace(site, cert_file=desired.cert_file, key_file=desired.key_file)
    return site


def _addressed(address: str) -> Site:
    site = read_address(address)
    for _, state in chosen_deployments(None):
        if state.address and reachable(state.address) == reachable(site.authority):
            ours = Site.of_state(state)
            if "://" not in address or site.scheme == ours.scheme:
                return ours
    return site


def _local(name: str | None) -> Site:
    found = chosen_one(name)
    if found is None:
        called = f" under the name {name}" if name else ""
        raise UpstreamError(
            f"nothing runs here{called}; start with: kvasir up, or name a gateway: --address HOST:PORT",
            code="not_ready",
        )
    _, state = found
    if not state.address:
        raise UpstreamError(
            f"{state.name} has no gateway yet (it is {state.phase}); see: kvasir status", code="not_ready"
        )
    return Site.of_state(state)
