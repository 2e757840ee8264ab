"""Real vLLM workers are killed while streams run: every stream ends with the text of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_tests.scenarios.scorecard import real_engines
from tests.kit.lab import gateway

pytestmark = [pytest.mark.soak, pytest.mark.slow]


async def test_streams_on_a_killed_decode_worker_go_on_token_for_token(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    async with real_engines.stage(tmp_path, pools=("prefill", "decode", "decode")) as stage:
        survived = await real_engines.decode_worker_killed(stage)
    assert survived.exact == survived.streams
    assert {output for _, output in survived.usage} == {1200}


async def test_prompts_on_a_killed_prefill_worker_are_prefilled_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    async with real_engines.stage(tmp_path, pools=("prefill", "prefill", "decode")) as stage:
        survived = await real_engines.prefill_worker_killed(stage)
    assert survived.exact == survived.streams
    assert min(prompt for prompt, _ in survived.usage) > 1000


async def test_streams_of_the_last_decode_worker_go_on_at_a_prefill_worker(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    async with real_engines.stage(tmp_path, pools=("prefill", "decode")) as alone:
        survived = await real_engines.decode_worker_killed(alone)
        assert survived.exact == survived.streams
        page = await gateway.metrics(alone.address)
        assert gateway.metric(page, "kvasir_cross_role_requests_total") >= survived.moved
