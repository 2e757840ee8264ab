"""One HTTP request of a gateway, as Envoy's external processing service and the endpoint picker protocol of
the Gateway API Inference Extension describe it (docs/proposals/004-endpoint-picker-protocol there).

The choice needs the body. In the mode FULL_DUPLEX_STREAMED the answer to the headers may wait for it; in
BUFFERED it comes with the body, and in other modes the headers have to do. Nothing of a request is changed
but the headers that name its destination.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.wire.ext_proc import ext_proc_pb2 as ext
from kvasir_platform.picker.endpoints import EndpointPicker, Picked
from kvasir_platform.picker.prompts import picked_for

DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_SPACE: Final = "envoy.lb"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_SPACE: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
TEST_SELECTION: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"
_CHUNK_BYTES: Final = 62_000
"""Envoy's buffers of a streamed body have 64 KiB; larger chunks may be refused."""

Response = Any
"""A ProcessingResponse; generated code has no types here."""


class ExtProcStream:
    """The conversation about one HTTP request. `handle` returns the responses to a message; `close` ends it,
    whatever came. `test_headers`: obey and set the headers of the extension's conformance tests."""

    def __init__(
        self,
        picker: EndpointPicker,
        now: Callable[[], float],
        *,
        max_body_bytes: int,
        test_headers: bool = False,
    ) -> None:
        self._picker = picker
        self._now = now
        self._max_body_bytes = max_body_bytes
        self._test_headers = test_headers
        self._request_mode = self._response_mode = ext.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._subset: list[str] | None = None
        self._body = bytearray()
        self._picked: Picked | None = None
        self._failed = False
        self._over = False

    def handle(self, message: Any) -> list[Response]:
        """Return the responses to a ProcessingRequest, in order."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        kind = message.WhichOneof("request")
        if kind is None or self._over or message.observability_mode:
            return []
        try:
            return list(getattr(self, f"_{kind}")(message))
        except KvasirError as error:
            self._over = True
            return [_refusal(error)]

    def close(self) -> None:
        """The gateway has ended the conversation. Idempotent."""
        picked, self._picked = self._picked, None
        if picked is not None:
            self._picker.ended(picked, self._now(), failed=self._failed)

    # -- the request

    def _request_headers(self, message: Any) -> Iterator[Response]:
        self._headers = _headers(message.request_headers.headers)
        self._subset = _subset(message.metadata_context)
        if message.request_headers.end_of_stream or self._request_mode in (ext.NONE, ext.STREAMED, ext.GRPC):
            yield self._destination(ext.ProcessingResponse(request_headers=ext.HeadersResponse()))
        elif self._request_mode != ext.FULL_DUPLEX_STREAMED:
            yield ext.ProcessingResponse(request_headers=ext.HeadersResponse())

    def _request_body(self, message: Any) -> Iterator[Response]:
        part = message.request_body
        if self._picked is not None:
            yield ext.ProcessingResponse(request_body=ext.BodyResponse())
            return
        self._body += part.body
        if len(self._body) > self._max_body_bytes:
            raise RequestError(
                f"The body has more than {self._max_body_bytes} bytes.", status=413, code="body_too_large"
            )
        if self._request_mode == ext.FULL_DUPLEX_STREAMED:
            if part.end_of_stream:
                yield from self._whole_request(ends=True)
        elif part.end_of_stream or self._request_mode == ext.BUFFERED_PARTIAL:
            yield self._destination(ext.ProcessingResponse(request_body=ext.BodyResponse()))
        else:
            yield ext.ProcessingResponse(request_body=ext.BodyResponse())

    def _request_trailers(self, message: Any) -> Iterator[Response]:
        if self._picked is None and self._request_mode == ext.FULL_DUPLEX_STREAMED:
            yield from self._whole_request(ends=False)
        yield ext.ProcessingResponse(request_trailers=ext.TrailersResponse())

    def _whole_request(self, *, ends: bool) -> Iterator[Response]:
        """Answer the headers, and pass the body on. `ends`: no trailers follow."""
        yield self._destination(
            ext.ProcessingResponse(request_headers=ext.HeadersResponse()),
            length=len(self._body) if ends else None,
        )
        for streamed in _streamed(bytes(self._body), ends=ends):
            yield ext.ProcessingResponse(request_body=streamed)
        self._body.clear()

    def _destination(self, response: Response, length: int | None = None) -> Response:
        """Pick, and name the endpoints in a response to headers or a body. May raise KvasirError."""
        subset = self._subset
        if self._test_headers and (wanted := self._headers.get(TEST_SELECTION)) is not None:
            subset = self._selected(wanted)
        asked = picked_for(self._headers, bytes(self._body))
        self._picked = self._picker.pick(asked, subset, self._now())
        value = ",".join(self._picked.endpoints)
        part = response.request_headers if response.HasField("request_headers") else response.request_body
        # Route tables may select by the header.
        part.response.clear_route_cache = True
        _set(part.response.header_mutation, DESTINATION, value)
        if length is not None:
            _set(part.response.header_mutation, "content-length", str(length))
        response.dynamic_metadata.update({DESTINATION_SPACE: {DESTINATION: value}})
        return response

    def _selected(self, wanted: str) -> list[str]:
        """Return the endpoints that a conformance test names, by address with or without a port."""
        names = {each.strip() for each in wanted.split(",")}
        known = (
            self._picker.endpoints
            if self._subset is None
            else self._picker.endpoints.intersection(self._subset)
        )
        return [each for each in known if each in names or each.rpartition(":")[0] in names]

    # -- the response

    def _response_headers(self, message: Any) -> Iterator[Response]:
        headers = _headers(message.response_headers.headers)
        served = _metadata(message.metadata_context, DESTINATION_SPACE, SERVED)
        if self._picked is not None and isinstance(served, str):
            self._picker.served_by(self._picked, served, self._now())
        self._failed = headers.get(":status", "200").startswith("5")
        response = ext.ProcessingResponse(response_headers=ext.HeadersResponse())
        if self._test_headers and isinstance(served, str):
            _set(response.response_headers.response.header_mutation, TEST_SERVED, served)
        yield response
        if message.response_headers.end_of_stream:
            self.close()

    def _response_body(self, message: Any) -> Iterator[Response]:
        part = message.response_body
        if self._picked is not None and not self._failed:
            self._picker.answers(self._picked, self._now())
        if self._response_mode == ext.FULL_DUPLEX_STREAMED:
            for streamed in _streamed(part.body, ends=part.end_of_stream):
                yield ext.ProcessingResponse(response_body=streamed)
        else:
            yield ext.ProcessingResponse(response_body=ext.BodyResponse())
        if part.end_of_stream:
            self.close()

    def _response_trailers(self, message: Any) -> Iterator[Response]:
        yield ext.ProcessingResponse(response_trailers=ext.TrailersResponse())
        self.close()


def _headers(sent: Any) -> dict[str, str]:
    """Return headers by name in lower case; the first of several counts."""
    found: dict[str, str] = {}
    for each in sent.headers:
        value = each.raw_value.decode("latin-1") if each.raw_value else each.value
        found.setdefault(each.key.lower(), value)
    return found


def _metadata(context: Any, space: str, key: str) -> str | list[str] | None:
    """Return an entry of the gateway's metadata, None if it is not there."""
    if space not in context.filter_metadata:
        return None
    fields = context.filter_metadata[space].fields
    if key not in fields:
        return None
    value = fields[key]
    if value.WhichOneof("kind") == "list_value":
        return [each.string_value for each in value.list_value.values]
    return str(value.string_value)


def _subset(context: Any) -> list[str] | None:
    """Return the endpoints that may be picked, None for all. Gateways send a list, some a text."""
    found = _metadata(context, SUBSET_SPACE, SUBSET)
    if isinstance(found, str):
        return [each.strip() for each in found.split(",") if each.strip()]
    return found


def _streamed(body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield a body in chunks; an empty one is one chunk, since its end must be said."""
    starts = range(0, len(body), _CHUNK_BYTES) or range(1)
    for start in starts:
        last = start + _CHUNK_BYTES >= len(body)
        chunk = ext.StreamedBodyResponse(body=body[start : start + _CHUNK_BYTES], end_of_stream=ends and last)
        yield ext.BodyResponse(
            response=ext.CommonResponse(body_mutation=ext.BodyMutation(streamed_response=chunk))
        )


def _set(mutation: Any, key: str, value: str) -> None:
    """Set a header, whatever the client sent under its name."""
    mutation.set_headers.append(
        ext.HeaderValueOption(
            header=ext.HeaderValue(key=key, raw_value=value.encode()),
            append_action=ext.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    )


def _refusal(error: KvasirError) -> Response:
    """Return the answer to the client in place of a model server's: 503 if none is ready, 429 if all are
    full."""
    full = isinstance(error, CapacityError) and error.code == "no_capacity"
    status = error.status if isinstance(error, RequestError) else 429 if full else 503
    body = {"error": {"message": error.message, "type": "invalid_request_error", "code": error.code}}
    if not isinstance(error, RequestError):
        body["error"]["type"] = "rate_limit_error" if full else "server_error"
    refusal = ext.ImmediateResponse(
        status=ext.HttpStatus(code=status), body=json.dumps(body).encode(), details=f"kvasir_{error.code}"
    )
    _set(refusal.headers, "content-type", "application/json")
    if isinstance(error, CapacityError):
        _set(refusal.headers, "retry-after", str(max(1, round(error.retry_after_s))))
    return ext.ProcessingResponse(immediate_response=refusal)
