"""Other deployments than the default, through `kvasir up`, Ray Serve and real vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
LENGTHS = (1, 31, 32, 33, 700, 2000)
StartStack = Callable[..., AbstractContextManager["Stack"]]


def _greedy(stack: Stack) -> list[str]:
    """The greedy continuations of fixed prompts of LENGTHS tokens."""
    rng = random.Random(5)
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60)
    texts = []
    for length in LENGTHS:
        prompt = [rng.randrange(10, 4000) for _ in range(length)]
        answer = client.completions.create(
            model="kvasir-tiny", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        texts.append(answer.choices[0].text)
    client.close()
    return texts


@pytest.mark.soak
def test_one_aggregated_worker_says_what_prefill_and_decode_apart_say(
    stack: Stack, start_stack: StartStack, tmp_path: Path
) -> None:
    example = EXAMPLES / "aggregated.yaml"
    apart = _greedy(stack)
    one_replica = ("--set", "pools.serve.replicas=1", "--set", "model.dtype=float32")
    with start_stack(tmp_path, "-f", str(example), *one_replica) as aggregated:
        assert [worker["pool"] for worker in aggregated.workers()] == ["serve"]
        assert _greedy(aggregated) == apart
        assert aggregated.metric("kvasir_transferred_bytes_total") == 0


@pytest.mark.soak
def test_tensor_parallel_pools_run_as_replicas_and_exchange_kv(
    start_stack: StartStack, tmp_path: Path
) -> None:
    size = ".engine.tensor_parallel_size=2"
    with start_stack(tmp_path, "--set", f"pools.prefill{size}", "--set", f"pools.decode{size}") as stack:
        assert all(_greedy(stack))
        assert stack.metric("kvasir_transferred_bytes_total") > 0
        assert stack.metric("kvasir_worker_transfers_failed_total") == 0
