"""Requests made from our own OpenAPI document, valid and not, are answered as that document says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.http_edge import serving

from kvasir.core.requests import FinishReason
from kvasir_platform.sim.scripted_router import ScriptedStream

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not in requirements/dev.lock")


def answer(stream: ScriptedStream) -> None:
    """One token for each choice, and the end."""
    for index in range(stream.request.sampling.n):
        stream.emit("a", index=index, finish=FinishReason.STOP)
    stream.finish()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A gateway in a thread of its own, since schemathesis calls it from this one."""
    found: list[str] = []
    up, down = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving() as edge:
            edge.router.script = answer
            found.append(f"http://{edge.host}:{edge.port}")
            up.set()
            await asyncio.to_thread(down.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(60)
    yield found[0]
    down.set()
    thread.join()


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    """The document, with the gateway's address in it."""
    schema = schemathesis.openapi.from_dict(json.loads(DOCUMENT.read_text()))
    schema.config.update(base_url=address)
    return schema


schema = schemathesis.pytest.from_fixture("document")


@pytest.mark.slow
@schema.parametrize()  # type: ignore[untyped-decorator]
def test_each_operation_answers_as_the_document_says(case: Any) -> None:
    case.call_and_validate()
