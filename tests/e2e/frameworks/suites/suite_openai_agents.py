"""OpenAI's Agents SDK: loops over tools, in parallel and streamed, hand-offs and typed output, by chats and
by the Responses API."""

from __future__ import annotations

import os
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


class City(BaseModel):
    """A typed output."""

    name: str
    inhabitants: int


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


@function_tool  # type: ignore[untyped-decorator]
def get_time(city: str) -> str:
    """Get the time in a city."""
    return f"noon in {city}"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest) -> Any:
    client = AsyncOpenAI(base_url=f"{os.environ['KVASIR_URL']}/v1", api_key="none", max_retries=0)
    return request.param(model=os.environ["KVASIR_MODEL"], openai_client=client)


async def test_an_agent_calls_a_tool_and_answers_with_its_result(model: Any) -> None:
    agent = Agent(name="a", instructions="Use tools.", model=model, tools=[get_weather, get_time])
    result = await Runner.run(agent, "What is the weather in Paris?")
    assert "sunny in Paris" in result.final_output


async def test_an_agent_calls_two_tools_in_parallel(model: Any) -> None:
    agent = Agent(
        name="a",
        model=model,
        tools=[get_weather, get_time],
        model_settings=ModelSettings(parallel_tool_calls=True, max_tokens=200, temperature=0.0),
    )
    result = await Runner.run(agent, "What are the weather and the time in Oslo?")
    assert "sunny in" in result.final_output
    assert "noon in" in result.final_output


async def test_a_streamed_run_has_the_same_end(model: Any) -> None:
    agent = Agent(name="a", model=model, tools=[get_weather])
    result = Runner.run_streamed(agent, "What is the weather in Rome?")
    events = [event async for event in result.stream_events()]
    assert {"raw_response_event", "run_item_stream_event"} <= {event.type for event in events}
    assert "sunny in Rome" in result.final_output


async def test_an_agent_hands_over_to_another(model: Any) -> None:
    other = Agent(name="weatherman", model=model, tools=[get_weather])
    agent = Agent(name="desk", model=model, handoffs=[other])
    result = await Runner.run(agent, "Please transfer me to the weatherman.")
    assert result.last_agent.name == "weatherman"


async def test_output_has_the_type_that_is_asked_for(model: Any) -> None:
    agent = Agent(name="a", model=model, output_type=City)
    result = await Runner.run(agent, "Describe the city named Bergen with 291000 inhabitants.")
    assert isinstance(result.final_output, City)


async def test_a_conversation_goes_on_from_its_own_items(model: Any) -> None:
    agent = Agent(name="a", model=model, tools=[get_weather])
    first = await Runner.run(agent, "What is the weather in Bonn?")
    second = await Runner.run(
        agent, [*first.to_input_list(), {"role": "user", "content": "And the weather in Graz?"}]
    )
    assert "sunny in" in second.final_output
