"""Tests of HTTP run on both event loops: uvloop serves, asyncio is what other tests and tools use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops for the modules about HTTP, the default for others."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    if item.path.name.startswith("test_http"):
        loops["uvloop"] = uvloop.new_event_loop
    return loops
