"""What the adapter asks of vLLM on its own account."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow


class Engine:
    """vLLM's front, with a connector or without; keeps what it is asked."""

    def __init__(self, connector: object) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=connector)
        self.asked: list[Any] = []

    async def generate(self, prompt: Any, params: Any, name: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(params.extra_args)
        yield name


@pytest.mark.parametrize(
    ("connector", "extra"), [(None, None), (object(), {"kv_transfer_params": {"tiers": False}})]
)
def test_a_warm_up_leaves_tiers_alone_and_says_nothing_of_them_where_there_is_no_connector(
    connector: object, extra: dict[str, Any] | None
) -> None:
    """vLLM warns of every request with words for a connector that it has not."""
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm import runtime

    engine: Any = Engine(connector)
    asyncio.run(runtime.run_on_each_rank(engine, 2, [1], 1, "warm-up"))
    assert engine.asked == [extra, extra]
