"""OpenAI's client uses the Responses API of a deployment with real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
MODEL = "kvasir-tiny"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_responses_are_created_streamed_continued_and_forgotten(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "temperature": 0}
        whole = client.responses.create(**asked)
        assert whole.output_text
        assert whole.usage is not None
        assert 1 <= whole.usage.output_tokens <= 12
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
        )
        assert whole.output_text.strip() == (chat.choices[0].message.content or "").strip()

        events = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == whole.output_text

        more = client.responses.create(
            model=MODEL, input="And?", previous_response_id=whole.id, max_output_tokens=4
        )
        assert more.usage is not None
        assert more.usage.input_tokens > whole.usage.input_tokens + 1
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)

        called = client.responses.create(
            model=MODEL, input="Weather in Rome?", tools=[TOOL], tool_choice="required", temperature=0
        )
        call = called.output[-1]
        assert call.type == "function_call"
        assert call.arguments.replace(" ", "") in ('{"city":"Paris"}', '{"city":"Rome"}')
        answered = client.responses.create(
            model=MODEL,
            previous_response_id=called.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
            max_output_tokens=4,
        )
        assert answered.status in ("completed", "incomplete")
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
        assert refused.value.param == "tools[0].type"
