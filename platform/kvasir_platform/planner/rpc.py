"""The connection of routers and planner: load reports and their replies, one small gRPC call a second.

Both sides prove with each message that they hold the deployment's session token: a message begins with a
digest (HMAC-SHA256), and the token itself is not sent. A reply's digest covers the report that it answers,
and a report has the planner's epoch and a counter, so that neither can be replayed. Reports contain counts,
and nothing of any prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import msgspec

from kvasir.core.demand import DemandReport, PlannerReply
from kvasir.core.errors import ConfigError, ProtocolError, UpstreamError

log = logging.getLogger(__name__)

SERVICE, METHOD = "kvasir.planner.v1.Planner", "Tell"
MAX_MESSAGE = 4 << 20
_TIMEOUT_S = 2.0
_THREADS = 2
_MAX_CALLS = 64
_DIGEST = hashlib.sha256().digest_size

Take = Callable[[DemandReport], PlannerReply]


def _sealed(token: str, context: bytes, body: bytes) -> bytes:
    return hmac.digest(token.encode(), context + body, "sha256") + body


def _opened(token: str, context: bytes, message: bytes) -> bytes:
    """Verify and strip the digest. Raises ProtocolError for a message without the right one."""
    digest, body = message[:_DIGEST], message[_DIGEST:]
    if not hmac.compare_digest(digest, hmac.digest(token.encode(), context + body, "sha256")):
        raise ProtocolError("the session token of the peer differs")
    return body


class PlannerServer:
    """The planner's end. `take` is called on threads of its own. Raises ConfigError if `bind` (host:port,
    port 0 for a free one) is in use."""

    def __init__(self, bind: str, token: str, take: Take) -> None:
        self._token = token
        self._take = take
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="planner"),
            maximum_concurrent_rpcs=_MAX_CALLS,
            options=[("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.so_reuseport", 0)],
        )
        handler = grpc.unary_unary_rpc_method_handler(self._tell)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        host = bind.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(bind)
        except RuntimeError as error:
            raise ConfigError(f"the planner cannot listen on {bind}: {error}; free the port") from error
        self.address = f"{host}:{port}"
        self._server.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.stop(None).wait()

    def _tell(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            report = msgspec.json.decode(_opened(self._token, b"report", message), type=DemandReport)
        except ProtocolError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        except msgspec.DecodeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a load report of this version: {error}")
        return _sealed(self._token, message[:_DIGEST], msgspec.json.encode(self._take(report)))


class PlannerClient:
    """A router's end."""

    def __init__(self, address: str, token: str) -> None:
        self._token = token
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.max_reconnect_backoff_ms", 2000),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._call = self._channel.unary_unary(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )

    async def tell(self, report: DemandReport) -> PlannerReply:
        """Raises UpstreamError if the planner does not respond, or the reply's digest is wrong."""
        message = _sealed(self._token, b"report", msgspec.json.encode(report))
        try:
            answer = await self._call(message, timeout=_TIMEOUT_S)
            return msgspec.json.decode(_opened(self._token, message[:_DIGEST], answer), type=PlannerReply)
        except (grpc.aio.AioRpcError, ProtocolError, msgspec.DecodeError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            raise UpstreamError(f"the planner does not respond: {details}", code="not_ready") from error

    async def close(self) -> None:
        """Idempotent."""
        await self._channel.close(None)
