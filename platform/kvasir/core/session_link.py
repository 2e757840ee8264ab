"""Exactly-once, in-order delivery over connections that break: the state of one end of a session.

Each end has one `SessionLink`. It numbers outgoing payloads, keeps them until the peer acknowledges them, and
tracks received ones. It does no I/O and reads no clock, so every interleaving can be tested. The tail is also
the send queue: the cursor lags behind on a slow connection and moves back after a broken one, and one bound
covers both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvasir.core.errors import ProtocolError
from kvasir.core.messages import (
    Abort,
    AdapterAnswer,
    AdapterOrder,
    AdapterReport,
    AdaptersHeld,
    Draining,
    EncodedStep,
    Goodbye,
    LoadAdapter,
    ReleaseLeases,
    RouterMessage,
    Serving,
    SetDraining,
    Submit,
    UnloadAdapter,
    WorkerMessage,
)
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, PositionLogprobs, StepBatch

P = TypeVar("P")

TAIL_OVERFLOW = "tail_overflow"


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one end. `tail_bytes` counts encoded payload bytes, as an upper estimate.

    Every frame carries an acknowledgement. If no frame is sent, an acknowledgement is due after `ack_every`
    payloads, or `ack_delay_s` seconds after the first unacknowledged one.
    """

    tail_messages: int = 4096
    tail_bytes: int = 64 << 20
    ack_every: int = 64
    ack_delay_s: float = 0.25


class SessionLink(Generic[P]):
    """One end of a session, sending payloads of type P.

    Raises ProtocolError for every violation by the peer and for an overflow of the tail (code
    `tail_overflow`). After either, the session has ended and the link must not be used.
    """

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._tail: dict[int, tuple[P, int]] = {}
        self._tail_bytes = 0
        self._next = 1
        self._last = 0
        self._received = 0
        self._ack_sent = 0
        self._unacked_since: float | None = None

    @property
    def received_seq(self) -> int:
        """Sequence number of the last payload that was received."""
        return self._received

    @property
    def sent_seq(self) -> int:
        """Sequence number of the last payload that was given to the current connection."""
        return self._next - 1

    @property
    def unacknowledged(self) -> int:
        """Number of payloads, sent or not, that the peer has not acknowledged."""
        return len(self._tail)

    @property
    def half_full(self) -> bool:
        """Whether the tail exceeds half of its bounds: the peer is slow or disconnected, and payloads that
        can be recovered otherwise should not be pushed."""
        limits = self._limits
        return 2 * len(self._tail) > limits.tail_messages or 2 * self._tail_bytes > limits.tail_bytes

    def push(self, payload: P, size: int) -> None:
        """Queue a payload of `size` bytes. Raises ProtocolError (`tail_overflow`)."""
        if len(self._tail) >= self._limits.tail_messages or self._tail_bytes + size > self._limits.tail_bytes:
            raise ProtocolError(
                f"the peer has left {len(self._tail)} messages ({self._tail_bytes} bytes) unacknowledged",
                code=TAIL_OVERFLOW,
            )
        self._last += 1
        self._tail[self._last] = (payload, size)
        self._tail_bytes += size

    def take(self) -> tuple[int, P] | None:
        """Return the next payload to send and its sequence number, or None."""
        if self._next > self._last:
            return None
        seq = self._next
        self._next += 1
        return seq, self._tail[seq][0]

    def take_ack(self) -> int:
        """Return the acknowledgement for a frame that is about to be sent."""
        self._ack_sent = self._received
        self._unacked_since = None
        return self._received

    @property
    def ack_due_s(self) -> float | None:
        """When the outstanding acknowledgement must be sent at the latest, on the clock of `receive`; None
        without one."""
        since = self._unacked_since
        return None if since is None else since + self._limits.ack_delay_s

    def ack_due(self, now: float) -> bool:
        """Whether the outstanding acknowledgement must be sent without waiting for a payload."""
        due_s = self.ack_due_s
        if due_s is None:
            return False
        return now >= due_s or self._received - self._ack_sent >= self._limits.ack_every

    def receive(self, seq: int, ack: int, *, has_payload: bool, now: float) -> bool:
        """Register a received frame. Return True if its payload must be processed, False for a duplicate or
        no payload.

        `now` is the reading of a monotonic clock in seconds, always the same clock.
        """
        self._acknowledge(ack)
        if not has_payload:
            if seq > self._received:
                raise ProtocolError(f"gap: peer has sent up to {seq}, only {self._received} came")
            return False
        if seq <= self._received:
            return False
        if seq != self._received + 1:
            raise ProtocolError(f"gap: expected frame {self._received + 1}, got {seq}")
        self._received = seq
        if self._unacked_since is None:
            self._unacked_since = now
        return True

    def resume(self, received_seq: int) -> int:
        """Start a new connection whose peer has processed payloads up to `received_seq`; later ones are sent
        again. Return their number."""
        if received_seq < self._last - len(self._tail):
            raise ProtocolError(f"the peer wants frames after {received_seq}, which it had acknowledged")
        self._acknowledge(received_seq)
        self._next = received_seq + 1
        # The handshake has acknowledged received frames, so an ack lost with the old connection is obsolete.
        self._ack_sent = self._received
        self._unacked_since = None
        return len(self._tail)

    def _acknowledge(self, ack: int) -> None:
        if ack >= self._next:
            raise ProtocolError(f"the peer acknowledges {ack}, but only {self._next - 1} was sent")
        for seq in range(self._last - len(self._tail) + 1, ack + 1):
            self._tail_bytes -= self._tail.pop(seq)[1]


_MESSAGE_BYTES = 32
_DELTA_BYTES = 48
_END_BYTES = 160
_LOGPROB_BYTES = 24
_POSITION_BYTES = 8
_PARTS_BYTES = 48
_CALL_BYTES = 32
_LOAD_BYTES = 192
_TIER_BYTES = 168
_GPU_BYTES = 64
_REQUEST_BYTES = 320
_MEDIA_BYTES = 64
_ADAPTER_BYTES = 40
_Other = RouterMessage | Draining | Serving | AdapterReport
"""All payloads but steps."""


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _delta_bytes(delta: Delta) -> int:
    size = _DELTA_BYTES + len(delta.request_id) + _text_bytes(delta.text) + 5 * len(delta.token_ids)
    if delta.logprobs:
        size += sum(map(_position_bytes, delta.logprobs))
    if delta.raw_length is not None or delta.prompt_logprobs or delta.embedding is not None:
        size += _parts_bytes(delta)
    if delta.finish is not None or delta.last or delta.handoff is not None:
        size += _END_BYTES + sum(
            _text_bytes(text) for text in (delta.stop_reason, delta.error, delta.error_message) if text
        )
        if delta.handoff is not None:
            size += len(delta.handoff.ticket) + len(delta.handoff.lease_id)
    return size


def _position_bytes(position: PositionLogprobs) -> int:
    return sum(_LOGPROB_BYTES + _text_bytes(each.token) for each in (position.sampled, *position.top))


def _parts_bytes(delta: Delta) -> int:
    size = _PARTS_BYTES + _text_bytes(delta.reasoning) + 4 * len(delta.embedding or ())
    for call in delta.tool_calls:
        size += _CALL_BYTES + sum(map(_text_bytes, (call.call_id, call.name, call.arguments)))
    return size + sum(_POSITION_BYTES + _position_bytes(each) for each in delta.prompt_logprobs if each)


def _load_bytes(load: EngineLoad) -> int:
    tiers = sum(_TIER_BYTES + _text_bytes(tier.trouble) for tier in load.tiers)
    return _LOAD_BYTES + tiers + _GPU_BYTES * len(load.gpus)


def _request_bytes(request: EngineRequest) -> int:
    size = _REQUEST_BYTES + 4 * len(request.tokens)
    # What few requests have is asked for only of those: this is computed for each request.
    size += _text_bytes(f"{request.request_id}{request.adapter or ''}{request.salt}{request.trace_context}")
    if request.handoff is not None:
        size += len(request.handoff.ticket) + len(request.handoff.lease_id)
    sampling = request.sampling
    if sampling.stop or sampling.bad_words:
        size += sum(4 + _text_bytes(text) for text in (*sampling.stop, *sampling.bad_words))
    if sampling.structured is not None:
        size += _text_bytes(sampling.structured.spec)
    if (parsing := request.parsing) is not None:
        size += _text_bytes(parsing.tools) + _text_bytes(parsing.function + parsing.template_kwargs)
    if request.media:
        size += sum(_MEDIA_BYTES + len(item.data) for item in request.media)
    ids = len(sampling.stop_token_ids) + len(sampling.allowed_token_ids)
    return size + 5 * ids + 20 * len(sampling.logit_bias)


def _adapter_message_bytes(message: AdapterOrder | AdapterReport) -> int:
    match message:
        case LoadAdapter(name=name, source=source, digest=digest):
            return sum(map(_text_bytes, (name, source, digest)))
        case UnloadAdapter(name=name):
            return _text_bytes(name)
        case AdaptersHeld(adapters=adapters):
            texts = [text for each in adapters for text in (each.name, each.source, each.digest)]
            return _ADAPTER_BYTES * len(adapters) + sum(map(_text_bytes, texts))
        case AdapterAnswer(code=code, message=text):
            return _text_bytes(code) + _text_bytes(text)


def payload_bytes(message: RouterMessage | WorkerMessage | EncodedStep) -> int:
    """Return an upper estimate of the encoded size of a payload in bytes, cheap enough for every step."""
    if isinstance(message, EncodedStep):
        return len(message.frame)
    if isinstance(message, StepBatch):
        return _MESSAGE_BYTES + _step_bytes(message)
    return _MESSAGE_BYTES + _other_bytes(message)


def media_bytes(message: RouterMessage) -> int:
    """Return the bytes of media files in a payload."""
    if not isinstance(message, Submit):
        return 0
    return sum(len(item.data) for request in message.requests for item in request.media)


def _step_bytes(step: StepBatch) -> int:
    load = _load_bytes(step.load) if step.load is not None else 0
    kv = _MESSAGE_BYTES + len(step.kv.log) if step.kv is not None else 0
    return load + kv + sum(map(_delta_bytes, step.deltas))


def _other_bytes(message: _Other) -> int:
    match message:
        case Submit(requests=requests):
            return sum(map(_request_bytes, requests))
        case Abort(request_ids=ids) | ReleaseLeases(lease_ids=ids):
            return sum(4 + _text_bytes(one) for one in ids)
        case Draining(reason=reason) | SetDraining(reason=reason):
            return _text_bytes(reason)
        case Goodbye() | Serving():
            return 0
        case _:
            return _adapter_message_bytes(message)
