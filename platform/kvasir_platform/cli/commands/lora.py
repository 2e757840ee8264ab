"""`kvasir lora list|load|unload`: LoRA adapters of a running deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvasir_platform.cli.common.gateway_client import load_adapter, unload_adapter, workers
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, number, size, table

_HEAD = ("NAME", "MODEL", "STATE", "RANK", "SIZE", "WORKERS", "COPIES", "SOURCE")
_NUMBERS = (_HEAD.index("RANK"), _HEAD.index("SIZE"))


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The arguments of `kvasir lora load`. `model` None means the first that adapters can be loaded for,
    `replicas` None all workers."""

    name: str
    source: str
    model: str | None = None
    replicas: int | None = None
    timeout_s: float = 150.0


def list_adapters(site: Site, output: CommandOutput) -> int:
    """Print one line for each adapter that was loaded at run time. Raises the errors of the gateway
    client."""
    found = _adapters(workers(site))
    output.data(found)
    if found:
        output.text(table(_HEAD, [_row(adapter) for adapter in found], _NUMBERS))
    else:
        output.text("no adapter was loaded at run time; load one with: kvasir lora load NAME SOURCE")
    return 0


def load(desired: LoadArguments, site: Site, output: CommandOutput) -> int:
    """Load an adapter, and wait until workers hold it. Raises RequestError if it cannot be loaded, and
    UpstreamError if the gateway does not answer."""
    body: dict[str, Any] = {"lora_name": desired.name, "lora_path": desired.source}
    if desired.model is not None:
        body["model"] = desired.model
    if desired.replicas is not None:
        body["replicas"] = desired.replicas
    done = load_adapter(site, body, desired.timeout_s)
    output.data(done)
    output.text(f"{desired.name} is loaded on {', '.join(done.get('workers', ()))}")
    return 0


def unload(name: str, timeout_s: float, site: Site, output: CommandOutput) -> int:
    """Unload an adapter, and wait until the requests that use it have ended. Raises as `load`."""
    done = unload_adapter(site, {"lora_name": name}, timeout_s)
    output.data(done)
    output.text(f"{name} is unloaded from {', '.join(done.get('workers', ()))}")
    return 0


def _adapters(found: Any) -> list[dict[str, Any]]:
    """Return the adapters by name and contents, each with its workers."""
    by_key: dict[tuple[str, str], dict[str, Any]] = {}
    for worker in found:
        for held in worker.get("adapters") or ():
            key = str(held.get("name")), str(held.get("digest"))
            adapter = by_key.setdefault(
                key, {**held, "model": worker.get("model"), "workers": [], "retiring": False}
            )
            adapter["workers"].append(worker.get("worker_id"))
            adapter["retiring"] = adapter["retiring"] or bool(held.get("retiring"))
    return [by_key[key] for key in sorted(by_key)]


def _row(adapter: dict[str, Any]) -> tuple[str, ...]:
    replicas = adapter.get("replicas")
    return (
        str(adapter["name"]),
        str(adapter["model"] or "-"),
        "unloading" if adapter["retiring"] else "loaded",
        number(adapter.get("rank")),
        size(adapter.get("nbytes") or 0),
        ", ".join(map(str, adapter["workers"])),
        f"{replicas} per pool" if replicas else "all",
        str(adapter.get("source", "?")),
    )
