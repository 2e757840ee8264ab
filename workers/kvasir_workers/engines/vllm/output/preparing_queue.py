"""Legs that wait to be prepared (preparing.py), beside those that wait for the engine.

One whose schema takes long to understand must not hold up those behind it, so what is not known already is
prepared outside the queue, and its leg joins the queue when it is ready. Nothing of vLLM is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvasir.core.requests import EngineRequest
from kvasir_workers.engines.vllm.output.stream import LegStream


class Busy(Exception):
    """A leg waited too long for its turn to be prepared."""


class LegPreparer(Protocol):
    """What is used of kvasir_workers.engines.vllm.output.preparing.Preparer."""

    def at_once(self, request: EngineRequest) -> Any: ...

    async def prepare(self, request: EngineRequest) -> Any: ...

    def close(self) -> None: ...


class Preparing:
    """`ready` takes a leg that is prepared, `fail` one that cannot be, with a code and a message. A leg that
    ended meanwhile is given to neither."""

    def __init__(
        self, ready: Callable[[LegStream], None], fail: Callable[[LegStream, str, str], None]
    ) -> None:
        self._ready = ready
        self._fail = fail
        self._preparer: LegPreparer | None = None
        self._refused: tuple[type[BaseException], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, preparer: LegPreparer, refused: tuple[type[BaseException], ...]) -> None:
        """Once, before any leg; `refused` is what it raises for what a client did wrong."""
        self._preparer, self._refused = preparer, refused

    async def stop(self) -> None:
        """Forget all that wait. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        preparer, self._preparer = self._preparer, None
        if preparer is not None:
            preparer.close()

    def begin(self, stream: LegStream) -> None:
        """Prepare a leg: at once where that costs little, which keeps its place in the queue."""
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
            fault = "invalid_value", "the tools or the schema take too long to understand: send simpler ones"
        except Busy as error:
            fault = "worker_overloaded", str(error)
        except self._refused as error:
            fault = "invalid_value", str(error)
        except Exception as error:  # noqa: BLE001 - what vLLM trips over in one request must not end others
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
