"""Requests generated from our OpenAPI document, valid and invalid, are answered as the document says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks as openapi
from tests.kit.gateway.http_edge import serving
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import FinishReason

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"

CHECKS = [
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
]
"""Those of every answer. What a document cannot say decides which requests are refused: the model's context,
say; and headers that make no sense are ignored."""
OPERATIONS: dict[str, Any] = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(json.loads(DOCUMENT.read_text())).get_all_operations()
    if isinstance(found, Ok)
}


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


@pytest.mark.slow
@pytest.mark.usefixtures("soak")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "not"])
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_each_operation_answers_as_the_document_says(label: str, mode: GenerationMode, address: str) -> None:
    @settings(suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        case.call_and_validate(base_url=address, checks=CHECKS)

    answered()
