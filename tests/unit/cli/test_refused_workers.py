"""A start whose workers the router refuses ends with the reason, since waiting cannot change it."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.gateway_client import missing_to_serve
from kvasir_platform.cli.common.gateway_site import Site

GOLDEN = "golden.chat_code: tokens: 144 != 146 (router)"


def worker(pool: str, state: str, reason: str = "") -> dict[str, Any]:
    return {"worker_id": f"{pool}-1", "pool": pool, "state": state, "reason": reason}


def not_ready(gateway: Any, *workers: dict[str, Any]) -> Site:
    gateway.answers["/health/ready"] = (503, {"error": {"message": "Not ready: no worker that decodes."}})
    gateway.answers["/status"] = (200, {"workers": list(workers)})
    return Site(gateway.address)


async def test_a_pool_of_refused_workers_ends_the_wait_with_the_reason(gateway: Any) -> None:
    site = not_ready(gateway, worker("p", "ready"), worker("d", "refused", "kv.dtype: fp8 != auto"))
    with pytest.raises(UpstreamError) as raised:
        await missing_to_serve(site)
    assert raised.value.message == "the router refuses the workers of pool d: kv.dtype: fp8 != auto"


async def test_tokens_that_differ_are_explained(gateway: Any) -> None:
    site = not_ready(gateway, worker("d", "refused", GOLDEN))
    with pytest.raises(UpstreamError) as raised:
        await missing_to_serve(site)
    assert GOLDEN in raised.value.message
    assert "The engine's tokenizer is not that of the model's tokenizer.json" in raised.value.message


@pytest.mark.parametrize(
    "workers",
    [
        (),
        (worker("d", "connecting"),),
        (worker("d", "refused", "x"), worker("d", "connecting")),
    ],
)
async def test_workers_that_may_still_come_are_waited_for(
    workers: tuple[dict[str, Any], ...], gateway: Any
) -> None:
    assert await missing_to_serve(not_ready(gateway, *workers)) == "Not ready: no worker that decodes."


async def test_a_gateway_that_shows_no_workers_is_waited_for(gateway: Any) -> None:
    site = not_ready(gateway)
    gateway.answers["/status"] = (401, {"error": {"message": "no key"}})
    assert await missing_to_serve(site) == "Not ready: no worker that decodes."
