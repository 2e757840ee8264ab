"""The relay that notes what passes between a load generator and its server."""

from __future__ import annotations

import pytest
from load_tests.scenarios.agreement.wire import Stream, figures_of, relayed
from openai import AsyncOpenAI
from tests.kit.openai_server import MODEL, OpenAiScript, serving_openai


def test_times_are_those_of_events_with_output() -> None:
    found = figures_of([Stream(1.0, [1.5, 1.75, 2.5], tokens=5), Stream(4.0, [5.0, 5.25], tokens=2)])
    names = [f"{name} {key}" for name in ("TTFT", "TPOT", "ITL", "E2E") for key in ("mean", "p50", "p95")]
    assert list(found) == names
    ttft, tpot, itl, e2e = [750, 500, 1000], [250, 250, 250], [416.667, 250, 750], [1375, 1250, 1500]
    assert [round(each, 3) for each in found.values()] == [*ttft, *tpot, *itl, *e2e]


async def test_streams_pass_whole_and_the_last_of_them_are_counted() -> None:
    async with serving_openai(OpenAiScript()) as url:
        with relayed(url) as wire:
            async with AsyncOpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0) as client:
                assert [model.id async for model in client.models.list()] == [MODEL]
                for tokens in (3, 7):
                    stream = await client.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": "one two"}],
                        max_tokens=tokens,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                    texts = [event.choices[0].delta.content async for event in stream if event.choices]
                    assert len([text for text in texts if text]) == tokens
            found = wire.take(2)
            # Chunks that come in one piece have one time.
            assert 0.0 < found["TTFT mean"] <= found["E2E mean"]
            with pytest.raises(ValueError, match="0 streams ended, 1 were expected"):
                wire.take(1)
