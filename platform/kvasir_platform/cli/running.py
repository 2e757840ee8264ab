"""Which deployments of this user run, and which one a command means."""

from __future__ import annotations

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.control.runtime_dir import RuntimeDir, State, default_base, deployments, ended


def chosen_deployments(name: str | None) -> list[tuple[RuntimeDir, State]]:
    """The deployments that run or have left something behind; those named `name` when it is given."""
    found = []
    for runtime in deployments(default_base()):
        state = runtime.read()
        if state is None or (name is not None and runtime.name != name):
            continue
        if runtime.holder() is not None or not ended(state):
            found.append((runtime, state))
    return found


def chosen_one(name: str | None) -> tuple[RuntimeDir, State] | None:
    """The one deployment that a command means, None when nothing runs. Raises ConfigError when
    several do and none was named."""
    found = chosen_deployments(name)
    if len(found) > 1:
        names = ", ".join(runtime.name for runtime, _ in found)
        raise ConfigError(f"several deployments run, name one of: {names}")
    return found[0] if found else None


def gateway_address(name: str | None, address: str | None) -> str:
    """`address`, or that of the one deployment that runs here (or is named so). Raises ConfigError as
    above, and UpstreamError where there is no gateway to ask."""
    if address is not None:
        return address.removeprefix("http://").rstrip("/")
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
    return state.address
