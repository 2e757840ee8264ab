"""Legs that wait to be prepared (preparing.py), separate from those that wait for the engine.

A leg with a slow schema must not delay those behind it, so a leg that is not cached is prepared outside the
queue, and joins the queue when it is ready. Nothing of vLLM is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvasir.core.requests import EngineRequest
from kvasir_workers.engines.vllm.output.stream import LegStream

_SLOW = "the tools or the schema take too long to understand: send simpler ones"
_SLOW_MEDIA = "the images, videos or audio take too long to decode: send smaller ones"


class Busy(Exception):
    """A leg waited too long to be prepared."""


class LegPreparer(Protocol):
    """The used methods of kvasir_workers.engines.vllm.output.preparing.Preparer."""

    def at_once(self, request: EngineRequest) -> Any: ...

    async def prepare(self, request: EngineRequest) -> Any: ...

    def close(self) -> None: ...


class Preparing:
    """`ready` is called with a prepared leg, `fail` with one that cannot be prepared, a code and a message.
    Neither is called for a leg that ended meanwhile."""

    def __init__(
        self, ready: Callable[[LegStream], None], fail: Callable[[LegStream, str, str], None]
    ) -> None:
        self._ready = ready
        self._fail = fail
        self._preparer: LegPreparer | None = None
        self._refused: tuple[type[BaseException], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, preparer: LegPreparer, refused: tuple[type[BaseException], ...]) -> None:
        """Call once, before any leg; `refused` are the exception types for client errors."""
        self._preparer, self._refused = preparer, refused

    async def stop(self) -> None:
        """Drop all waiting legs. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        preparer, self._preparer = self._preparer, None
        if preparer is not None:
            preparer.close()

    def begin(self, stream: LegStream) -> None:
        """Prepare a leg: at once if that is fast, which keeps its place in the queue."""
        if self._preparer is None:
            raise RuntimeError("nothing has been started")
        prepared = self._preparer.at_once(stream.request)
        if prepared is not None:
            self._prepared(stream, prepared)
            return
        task = asyncio.create_task(self._prepare(self._preparer, stream), name="vllm-prepare")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, preparer: LegPreparer, stream: LegStream) -> None:
        fault: tuple[str, str]
        try:
            prepared = await preparer.prepare(stream.request)
        except TimeoutError:
            fault = "invalid_value", _SLOW_MEDIA if stream.request.media else _SLOW
        except Busy as error:
            fault = "worker_overloaded", str(error)
        except self._refused as error:
            fault = "invalid_value", str(error)
        except Exception as error:  # noqa: BLE001 - an error in one request must not end others
            fault = "worker_failed", f"{type(error).__name__}: {error}"
        else:
            if not stream.ended:
                self._prepared(stream, prepared)
            return
        if not stream.ended:
            self._fail(stream, *fault)

    def _prepared(self, stream: LegStream, prepared: Any) -> None:
        stream.prepared, stream.parsers = prepared, prepared.parsers
        self._ready(stream)
