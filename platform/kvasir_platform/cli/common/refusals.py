"""Pools that the router will never use, because it refuses each of their workers.

A worker that does not fit its peers or the router stays refused until one of them is replaced. During a start
nothing is, so that waiting for it only hides the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvasir.core.errors import ConfigError, StartError, UpstreamError
from kvasir_platform.cli.common.gateway_client import workers
from kvasir_platform.cli.common.gateway_site import Site

_EQUAL = (
    "make both sides equal: in kvasir.yaml, or in the model's folder, which must not change during a start"
)
_OTHER_TOKENS = (
    "set model_type in config.json to that of the model whose tokenizer.json the folder has: for some model "
    "types transformers, and with it the engine, puts rules of its own in place of the file's"
)


async def raise_if_refused(site: Site, replicas: Mapping[str, int]) -> None:
    """Raise StartError with the router's reason if it refuses every replica of a pool, of which `replicas`
    has the number by pool. Does nothing if the router does not tell."""
    try:
        known = await asyncio.to_thread(workers, site)
    except (UpstreamError, ConfigError):
        return
    for pool, wanted in replicas.items():
        reasons = [
            str(worker.get("reason") or "")
            for worker in known
            if worker.get("pool") == pool and worker.get("state") == "refused"
        ]
        if wanted and len(reasons) >= wanted:
            raise StartError(
                f"the router refuses every worker of pool {pool}: {reasons[0]}",
                remedy=_OTHER_TOKENS if reasons[0].startswith("golden.") else _EQUAL,
            )
