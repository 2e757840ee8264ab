"""Tests of HTTP run on both event loops: uvloop serves, asyncio is what other tests and tools use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.kit.suite.loops import new_uvloop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops for the modules about HTTP, the default for others."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    if item.path.name.startswith("test_http"):
        loops["uvloop"] = new_uvloop
    return loops


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave slow tests on the loop that does not serve to the nightly job."""
    for item in items:
        here = item.path.parent == Path(__file__).parent
        if here and item.get_closest_marker("slow") is not None and item.name.endswith("[asyncio]"):
            item.add_marker(pytest.mark.soak)
