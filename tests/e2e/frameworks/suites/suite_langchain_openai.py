"""LangChain's standard tests of chat models, with its OpenAI package: chats and the Responses API."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChats(ChatModelIntegrationTests):  # type: ignore[misc]
    """Chats."""

    @property
    def chat_model_class(self) -> Any:
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Its parameters."""
        return {
            "model": os.environ["KVASIR_MODEL"],
            "base_url": f"{os.environ['KVASIR_URL']}/v1",
            "api_key": "none",
            "max_tokens": 400,
            "temperature": 0,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        """`response_format: json_object`."""
        return True

    @property
    def has_tool_choice(self) -> bool:
        """`tool_choice`."""
        return True


class TestResponses(TestChats):
    """The Responses API."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Its parameters."""
        return {**super().chat_model_params, "use_responses_api": True}


pytestmark = pytest.mark.filterwarnings("ignore")
