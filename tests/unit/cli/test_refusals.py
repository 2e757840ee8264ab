"""A start ends when the router refuses all workers of a pool, and not while another may still be accepted."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.core.errors import StartError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.refusals import raise_if_refused

WHY = "kv.dtype: fp8 != bfloat16 (prefill/prefill-1)"


def worker(pool: str, state: str, reason: str = "") -> dict[str, Any]:
    return {"worker_id": f"{pool}-1", "pool": pool, "state": state, "reason": reason}


def known(gateway: Any, *workers: dict[str, Any]) -> Site:
    gateway.answers["/status"] = (200, {"workers": list(workers)})
    return Site(gateway.address)


async def test_a_pool_whose_only_worker_is_refused_ends_the_start_with_the_routers_reason(
    gateway: Any,
) -> None:
    site = known(gateway, worker("prefill", "ready"), worker("decode", "refused", WHY))
    with pytest.raises(StartError) as caught:
        await raise_if_refused(site, {"prefill": 1, "decode": 1})
    assert caught.value.message == f"the router refuses every worker of pool decode: {WHY}"
    assert "make both sides equal" in caught.value.remedy


async def test_tokens_that_differ_come_with_the_files_to_compare(gateway: Any) -> None:
    site = known(gateway, worker("d", "refused", "golden.chat_code: tokens: 144 != 146 (router)"))
    with pytest.raises(StartError) as caught:
        await raise_if_refused(site, {"d": 1})
    assert "set model_type in config.json to that of the model" in caught.value.remedy


@pytest.mark.parametrize(
    ("workers", "replicas"),
    [
        ([worker("decode", "connecting", "no answer")], 1),
        ([worker("decode", "refused", WHY)], 2),
        ([worker("decode", "refused", WHY), worker("decode", "ready")], 2),
        ([worker("decode", "refused", WHY)], 0),
        ([], 1),
    ],
    ids=["it connects", "another is to be found", "another serves", "the pool sleeps", "none is found"],
)
async def test_a_start_goes_on_while_a_worker_may_be_accepted(
    gateway: Any, workers: list[dict[str, Any]], replicas: int
) -> None:
    await raise_if_refused(known(gateway, *workers), {"decode": replicas})


async def test_a_gateway_that_does_not_tell_ends_no_start(gateway: Any) -> None:
    gateway.answers["/status"] = (401, {"error": {"code": "invalid_api_key", "message": "no key"}})
    await raise_if_refused(Site(gateway.address), {"decode": 1})
    await raise_if_refused(Site("127.0.0.1:1"), {"decode": 1})
