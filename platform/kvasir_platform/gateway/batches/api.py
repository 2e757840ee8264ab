"""The endpoints `/v1/files` and `/v1/batches`. Storage blocks, so that every answer is made in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import unquote

import msgspec

from kvasir.config.spec.tenants import Scope
from kvasir.core.errors import CapacityError, RequestError
from kvasir.ports.clock import Rng
from kvasir_platform.gateway.batches.context import BatchContext
from kvasir_platform.gateway.batches.form import parse_form
from kvasir_platform.gateway.batches.names import new_key
from kvasir_platform.gateway.batches.schema import BATCHES, EMBEDDINGS, FILES, FileDeleted
from kvasir_platform.gateway.batches.stored_batches import decode_create
from kvasir_platform.gateway.http.exchange import JSON, Exchange, HttpRequest
from kvasir_platform.gateway.identity.identities import EMBEDDING_SCOPES, TEXT_SCOPES
from kvasir_platform.gateway.openai.schema.limits import bad, missing
from kvasir_platform.gateway.tenants.caller import Caller

CONTENT, CANCEL = "/content", "/cancel"
_JSONL = b"application/jsonl"
_MOST_WAITING = 256

Handler = Callable[[Caller, Exchange], None]
Authorize = Callable[[Mapping[bytes, bytes], frozenset[Scope]], object]
"""Takes the headers of a request and the scopes of which it needs one. Raises RequestError."""


class BatchesApi:
    """Both groups of endpoints. `context` is None where there is no storage; `on_change` is called
    when there may be work."""

    def __init__(
        self, context: BatchContext | None, authorize: Authorize, rng: Rng, on_change: Callable[[], None]
    ) -> None:
        self._context = context
        self._authorize = authorize
        self._rng = rng
        self._on_change = on_change
        self._running: set[asyncio.Future[None]] = set()

    def route(self, path: str) -> tuple[str, Handler] | None:
        """Return the methods of a path and its handler, None for a path of another API."""
        if path == FILES:
            return "GET or POST", self._files
        if path == BATCHES:
            return "GET or POST", self._batches
        if path.startswith(FILES + "/"):
            content = path.endswith(CONTENT)
            return ("GET", self._content) if content else ("GET or DELETE", self._file)
        if path.startswith(BATCHES + "/"):
            return ("POST", self._cancel) if path.endswith(CANCEL) else ("GET", self._batch)
        return None

    def is_upload(self, request: HttpRequest) -> bool:
        """Return whether a request uploads a file. Raise RequestError 404 where none are kept."""
        upload = request.path == FILES and request.method == "POST"
        if upload:
            self._stored()
        return upload

    def _files(self, caller: Caller, exchange: Exchange) -> None:
        """GET and POST /v1/files."""
        context, request, tenant = self._stored(), exchange.request, caller.tenant
        if request.method != "POST":
            self._answer(exchange, lambda: _json(context.files.page(tenant, request.query)))
            return
        caller.charge_body(len(request.body))
        self._answer(exchange, partial(self._upload, context, tenant, exchange))

    def _upload(self, context: BatchContext, tenant: str, exchange: Exchange) -> bytes:
        request = exchange.request
        form = parse_form(request.body, request.headers.get(b"content-type", b"").decode("latin-1"))
        for name in ("file", "purpose"):
            if name not in form:
                raise missing(name)
        for name in form:
            if name not in ("file", "purpose"):
                raise RequestError(
                    f"Unknown field of the form: {name[:64]!r}.", code="unknown_parameter", param=name[:64]
                )
        purpose, file = form["purpose"].text, form["file"]
        if purpose != "batch":
            raise bad("purpose is batch: files are kept for batches only.", "purpose")
        if len(file.content) > context.spec.max_file_bytes:
            raise bad(
                f"The file has {len(file.content)} bytes; {context.spec.max_file_bytes} are allowed.", "file"
            )
        name = "file-" + new_key(context.wall(), self._rng)
        shown = file.filename.rpartition("/")[2][:255] or "batch.jsonl"
        return _json(context.files.add(tenant, name, shown, purpose, file.content))

    def _file(self, caller: Caller, exchange: Exchange) -> None:
        """GET and DELETE /v1/files/{id}."""
        context, tenant = self._stored(), caller.tenant
        name = unquote(exchange.request.path[len(FILES) + 1 :])
        if exchange.request.method != "DELETE":
            self._answer(exchange, lambda: _json(context.files.show(tenant, name)))
            return

        def delete() -> bytes:
            context.files.show(tenant, name)
            if (batch := context.batches.uses(tenant, name)) is not None:
                raise RequestError(
                    f"{batch} reads the file; cancel it first.", status=409, code="file_in_use", param="id"
                )
            context.files.remove(tenant, name)
            return _json(FileDeleted(name, "file", True))

        self._answer(exchange, delete)

    def _content(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/files/{id}/content."""
        context, tenant = self._stored(), caller.tenant
        name = unquote(exchange.request.path[len(FILES) + 1 : -len(CONTENT)])
        self._answer(exchange, lambda: context.files.content(tenant, name), _JSONL)

    def _batches(self, caller: Caller, exchange: Exchange) -> None:
        """GET and POST /v1/batches."""
        context, request, tenant = self._stored(), exchange.request, caller.tenant
        if request.method != "POST":
            self._answer(exchange, lambda: _json(context.batches.page(tenant, request.query)))
            return
        asked = decode_create(request.body)
        self._authorize(request.headers, EMBEDDING_SCOPES if asked.endpoint == EMBEDDINGS else TEXT_SCOPES)
        name = "batch_" + new_key(context.wall(), self._rng)

        def create() -> bytes:
            context.files.show(tenant, asked.input_file_id)
            return _json(context.batches.create(tenant, name, asked))

        self._answer(exchange, create, changes=True)

    def _batch(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/batches/{id}."""
        context, tenant = self._stored(), caller.tenant
        name = unquote(exchange.request.path[len(BATCHES) + 1 :])
        self._answer(exchange, lambda: _json(context.batches.show(tenant, name)))

    def _cancel(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/batches/{id}/cancel."""
        context, tenant = self._stored(), caller.tenant
        name = unquote(exchange.request.path[len(BATCHES) + 1 : -len(CANCEL)])
        self._answer(exchange, lambda: _json(context.batches.cancel(tenant, name)), changes=True)

    def _stored(self) -> BatchContext:
        if self._context is None:
            raise RequestError(
                "This server keeps no files and runs no batches; set gateway.batches.storage.",
                status=404,
                code="batches_disabled",
            )
        return self._context

    def _answer(
        self,
        exchange: Exchange,
        make: Callable[[], bytes],
        content_type: bytes = JSON,
        *,
        changes: bool = False,
    ) -> None:
        """Answer with what `make` returns or raises, in a thread. `changes`: it changes a batch."""
        context = self._stored()
        if len(self._running) >= _MOST_WAITING:
            raise CapacityError("Too many calls wait for the storage of files.", code="storage_unavailable")

        async def answer() -> None:
            try:
                body = await context.later(make)
                if changes:
                    self._on_change()
                exchange.respond(200, body, content_type)
            except Exception as error:  # noqa: BLE001 - whatever a step raises is the answer, as in the gateway
                context.answer(exchange, error)

        task = asyncio.get_running_loop().create_task(answer(), name="files and batches")
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)
