"""LangChain's standard tests of chat models, with its Anthropic package."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestMessages(ChatModelIntegrationTests):  # type: ignore[misc]
    """The Messages API."""

    @property
    def chat_model_class(self) -> Any:
        """The class under test."""
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Its parameters."""
        return {
            "model": os.environ["KVASIR_MODEL"],
            "base_url": os.environ["KVASIR_URL"],
            "api_key": "none",
            "max_tokens": 400,
            "temperature": 0,
            "max_retries": 0,
        }

    @property
    def has_tool_choice(self) -> bool:
        """`tool_choice`."""
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        """Blocks of Anthropic's form."""
        return True
