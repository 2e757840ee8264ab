"""Pydantic AI: loops over tools, retries, streams and typed output in each of its modes, by each API."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A typed output."""

    name: str
    inhabitants: int


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest) -> Any:
    name, url = os.environ["KVASIR_MODEL"], os.environ["KVASIR_URL"]
    if request.param == "messages":
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def with_weather(model: Any) -> Any:
    agent = Agent(model, system_prompt="Use tools.")

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}"

    return agent


async def test_an_agent_calls_a_tool_and_answers_with_its_result(model: Any) -> None:
    result = await with_weather(model).run("What is the weather in Paris?")
    assert "sunny in Paris" in result.output
    assert result.usage().requests == 2


async def test_a_streamed_run_has_the_same_end(model: Any) -> None:
    async with with_weather(model).run_stream("What is the weather in Rome?") as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "sunny in Rome" in "".join(pieces)


async def test_a_tool_that_asks_for_a_retry_is_answered(model: Any) -> None:
    agent, tries = Agent(model), []

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        tries.append(city)
        if len(tries) == 1:
            raise ModelRetry("name the country too")
        return "sunny"

    result = await agent.run("What is the weather in Oslo?")
    assert result.output


@pytest.mark.parametrize("mode", [ToolOutput, NativeOutput, PromptedOutput])
async def test_output_has_the_type_that_is_asked_for(model: Any, mode: Any) -> None:
    if mode is NativeOutput and isinstance(model, AnthropicModel):
        # The package sends it to the models only that it lists as capable of it.
        model = AnthropicModel(
            model.model_name, provider=model._provider, profile={"supports_json_schema_output": True}
        )
    agent = Agent(model, output_type=mode(City))
    result = await agent.run("Describe the city named Bergen with 291000 inhabitants.")
    assert isinstance(result.output, City)


async def test_a_conversation_goes_on_from_its_messages(model: Any) -> None:
    agent = with_weather(model)
    first = await agent.run("What is the weather in Bonn?")
    second = await agent.run("And the weather in Graz?", message_history=first.all_messages())
    assert "sunny in" in second.output
