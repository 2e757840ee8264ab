"""KV that a removed replica had computed is not computed again: real Ray Serve, vLLM and Redis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
from tests.kit.lab.redis_server import RedisServer

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
]
StartStack = Callable[..., AbstractContextManager["Stack"]]

DEPLOYMENT = """
model: {{max_model_len: 1600}}
disaggregation: never
routing: {{policy: round_robin}}
pools:
  - name: workers
    role: both
    replicas: 2
    scaling: {{min: 1, max: 2}}
    engine: {{threads: 1, kv_cache_bytes: 33554432}}
tiers:
  cpu: {{bytes: 67108864}}
  redis: {{url: "redis://{address}", lookup_timeout_s: 2, timeout_s: 5}}
scaling: {{interval_s: 2, window_s: 600}}
worker: {{drain_s: 5}}
"""
PROMPTS = [f"{word} " * 160 for word in ("river", "stone", "bread", "light", "house", "voice")]
BLOCK = 32
PATIENCE_S = 120.0


def _cached(client: openai.OpenAI, prompt: str) -> tuple[int, int]:
    """The tokens of a prompt that were found in a cache, and all of them."""
    answer = client.completions.create(
        model="kvasir-tiny", prompt=prompt, max_tokens=2, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (0 if details is None else details.cached_tokens or 0), answer.usage.prompt_tokens


def _computed(stack: Stack) -> list[int]:
    """The tokens of the prompts that each worker that serves was given."""
    return [
        worker["load"]["prefix_queries_tokens"]
        for worker in stack.workers()
        if worker["state"] == "ready" and worker["load"]
    ]


def test_prompts_of_a_replica_that_went_are_found_in_redis_by_the_one_that_stays(
    start_stack: StartStack, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as redis:
        spec = tmp_path / "scaling.yaml"
        spec.write_text(DEPLOYMENT.format(address=redis.address))
        with start_stack(tmp_path, "-f", str(spec)) as stack:
            client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=60)
            # The stack is ready with the first that the router has found.
            stack.wait_until(lambda: len(_computed(stack)) == 2, PATIENCE_S, "both workers")
            assert [_cached(client, prompt)[0] for prompt in PROMPTS] == [0] * len(PROMPTS)
            stack.wait_until(
                lambda: sum(map(bool, _computed(stack))) == 2, PATIENCE_S, "each to compute some of them"
            )
            asked = stack.kvasir("scale", "workers=1")
            assert asked.returncode == 0, asked.stderr
            stack.wait_until(lambda: len(stack.workers()) == 1, PATIENCE_S, "one worker")
            for prompt in PROMPTS:
                cached, tokens = _cached(client, prompt)
                assert cached >= (tokens - 1) // BLOCK * BLOCK - BLOCK, prompt[:20]
