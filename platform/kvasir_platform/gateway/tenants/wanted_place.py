"""Where an operator wants a request to run: on one worker, or as one routing policy places it.

The console's playground asks the same of two workers or two policies, to compare their answers and times.
Clients do not choose where they run: a greedy one could take the best worker for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

from kvasir.config.spec.routing import PolicyName
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.tenants.caller import Caller

WORKER_HEADER = "x-kvasir-worker"
POLICY_HEADER = "x-kvasir-policy"
POLICIES: tuple[str, ...] = get_args(PolicyName)
MAX_WORKER = 256
"""Bytes of a worker's id."""
_WORKER, _POLICY = WORKER_HEADER.encode(), POLICY_HEADER.encode()


class WantedPlace(NamedTuple):
    """The worker and the routing policy that were asked for, each "" for none."""

    worker: str = ""
    policy: str = ""

    def or_policy(self, policy: str) -> WantedPlace:
        """Return it with this policy unless one was asked for."""
        return self if self.policy or not policy else self._replace(policy=policy)


ANYWHERE = WantedPlace()


def wanted_place(headers: Mapping[bytes, bytes], caller: Caller) -> WantedPlace:
    """Return what the headers ask for. Raise RequestError if they ask for anything and the caller is no
    operator, or for a policy that does not exist; the router checks the worker."""
    worker, policy = headers.get(_WORKER), headers.get(_POLICY)
    if worker is None and policy is None:
        return ANYWHERE
    caller.check_operator()
    named = (policy or b"").strip().decode("latin-1")
    if named and named not in POLICIES:
        raise RequestError(
            f"There is no routing policy {named[:64]!r}; the policies are: {', '.join(POLICIES)}.",
            code="invalid_value",
            param=POLICY_HEADER,
        )
    if worker is not None and len(worker) > MAX_WORKER:
        raise RequestError(
            f"{WORKER_HEADER} has {len(worker)} bytes; {MAX_WORKER} are allowed.",
            code="invalid_value",
            param=WORKER_HEADER,
        )
    return WantedPlace((worker or b"").strip().decode("latin-1"), named)
