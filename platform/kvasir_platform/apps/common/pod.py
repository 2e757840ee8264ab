"""Values that a process reads from its pod: the pod's address, which no spec can name in advance."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError

POD = "pod"
POD_IP = "KVASIR_POD_IP"


def pod_ip(environ: Mapping[str, str]) -> str:
    """Return the address of this pod. Raises ConfigError if it is not set."""
    value = environ.get(POD_IP, "")
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        what = f"it is {value!r}, which is no IP address" if value else "it is not set"
        raise ConfigError(
            f"the variable {POD_IP} must say the pod's address, and {what}; set it in the pod's template "
            "from the field status.podIP"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"the variable {POD_IP} is {value}, which means every address; set it from status.podIP"
        )
    return str(address)


def at_pod(deployment: Deployment, environ: Mapping[str, str]) -> Deployment:
    """Return the deployment with this pod's address for `pod`. Raises ConfigError as `pod_ip` does."""
    worker, transfer = deployment.worker, deployment.transfer
    if POD not in (worker.host, transfer.host):
        return deployment
    here = {"host": pod_ip(environ)}
    if worker.host == POD:
        worker = worker.model_copy(update=here)
    if transfer.host == POD:
        transfer = transfer.model_copy(update=here)
    return deployment.model_copy(update={"worker": worker, "transfer": transfer})
