"""One leg inside the engine: converts vLLM's outputs to deltas with contiguous offsets.

Nothing of vLLM is imported: an output is read by its attributes, so that every rule here is tested without an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvasir.core.requests import (
    Delta,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)
from kvasir_workers.engines.continued import continued_tokens
from kvasir_workers.engines.parts import PartsParser, taken_apart
from kvasir_workers.engines.vllm.output.grammar_budget import TOO_COSTLY

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


class VllmCompletion(Protocol):
    """The used attributes of vllm.outputs.CompletionOutput (output kind DELTA)."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None


class VllmOutput(Protocol):
    """The used attributes of vllm.outputs.RequestOutput."""

    outputs: list[Any]
    finished: bool
    num_cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None
    metrics: Any
    prompt_logprobs: Any


class LegStream:
    """One submitted leg. `ended` is True once its last delta was created.

    `collector` is vLLM's handle of the request, once it has one, and `lease_id` the lease under which a
    PREFILL leg offers its KV. `prepared` is the preparation of a leg that needs one, and `parsers` parse its
    choices. `fails_without_kv`: a DECODE leg ends if its KV does not arrive, instead of computing it.
    """

    __slots__ = (
        "_begin",
        "_begun",
        "_fails_without_kv",
        "_logprobs",
        "_offsets",
        "_output_tokens",
        "_prompt_logprobs",
        "collector",
        "ended",
        "lease_id",
        "parsers",
        "prepared",
        "request",
    )

    def __init__(self, request: EngineRequest, *, fails_without_kv: bool = False) -> None:
        self.request = request
        self._fails_without_kv = fails_without_kv
        self.collector: Any = None
        self.lease_id = ""
        self.ended = False
        self.prepared: Any = None
        self.parsers: Sequence[PartsParser] = ()
        self._begun = False
        self._begin = continued_tokens(request)
        self._offsets: dict[int, int] = {}
        self._output_tokens = 0
        self._logprobs = request.sampling.logprobs
        self._prompt_logprobs = request.sampling.prompt_logprobs

    @property
    def wants_preparing(self) -> bool:
        """A prefill leg generates nothing that could follow a rule or be parsed; every leg needs the
        media."""
        request = self.request
        if request.media:
            return True
        if request.leg not in (Leg.FULL, Leg.DECODE):
            return False
        return request.parsing is not None or request.sampling.structured is not None

    def deltas(self, output: VllmOutput) -> list[Delta]:
        """Return the deltas of `output`: none after the end, and for a step that only advanced a prefill."""
        if self.ended:
            return []
        made = []
        last_index = len(output.outputs) - 1
        for position, completion in enumerate(output.outputs):
            last = output.finished and position == last_index
            delta = self._delta(completion, output if last else None)
            if not (last or delta.finish is not None or delta.token_ids or delta.text):
                continue
            if not (self._begun or last) and output.num_cached_tokens and self.request.leg is Leg.FULL:
                delta = replace(delta, usage=self._usage(output.num_cached_tokens, {}))
            self._begun = True
            if self.parsers:
                delta = taken_apart(delta, self.parsers[delta.index])
            if self._prompt_logprobs is not None and output.prompt_logprobs is not None:
                delta = replace(delta, prompt_logprobs=self._prompt_positions(output.prompt_logprobs))
            made.append(delta)
        self.ended = output.finished
        return made

    def offered(self, moved: Mapping[str, Any]) -> Delta | None:
        """Return the hand-off of a PREFILL leg that still computes; None for one that is not this leg's."""
        handoff = handoff_of(moved)
        if self.ended or handoff is None or handoff.lease_id != self.lease_id:
            return None
        return Delta(request_id=self.request.request_id, offset=self._begin, handoff=handoff)

    def abort(self) -> Delta:
        """Return the last delta of a leg that was stopped before the engine had it."""
        return self._end(FinishReason.ABORT, None, None)

    def fail(self, code: str, message: str) -> Delta:
        """Return the last delta of a leg that was refused or lost."""
        return self._end(FinishReason.ERROR, code, message)

    def _end(self, finish: FinishReason, code: str | None, message: str | None) -> Delta:
        self.ended = True
        return Delta(
            request_id=self.request.request_id,
            offset=self._offsets.get(0, self._begin),
            finish=finish,
            last=True,
            usage=self._usage(0, {}),
            timings=Timings(),
            error=code,
            error_message=message,
        )

    def _delta(self, completion: VllmCompletion, end: VllmOutput | None) -> Delta:
        request = self.request
        finish = _FINISH[completion.finish_reason] if completion.finish_reason else None
        tokens: tuple[int, ...] = ()
        text = ""
        logprobs: tuple[PositionLogprobs, ...] = ()
        if request.leg is not Leg.PREFILL:
            tokens, text = tuple(completion.token_ids), completion.text
            logprobs = self._positions(tokens, completion.logprobs)
        offset = self._offsets.get(completion.index, self._begin)
        self._offsets[completion.index] = offset + len(tokens)
        self._output_tokens += len(tokens)
        error, message = self._failure(finish, completion.stop_reason)
        handoff = None
        usage = None
        timings = None
        if end is not None:
            moved = end.kv_transfer_params or {}
            if request.leg is Leg.PREFILL and finish in (FinishReason.LENGTH, FinishReason.STOP):
                handoff = handoff_of(moved)
                if handoff is None:
                    finish, error = FinishReason.ERROR, "transfer_failed"
                    message = "the engine's connector offered no KV for this prompt"
            usage = self._usage(end.num_cached_tokens or 0, moved)
            timings = _timings(
                end.metrics, float(moved.get("transfer_s", 0.0)), float(moved.get("tier_s", 0.0))
            )
        return Delta(
            request_id=request.request_id,
            offset=offset,
            token_ids=tokens,
            text=text,
            index=completion.index,
            logprobs=logprobs,
            finish=finish,
            stop_reason=None if error or completion.stop_reason is None else str(completion.stop_reason),
            last=end is not None,
            usage=usage,
            timings=timings,
            handoff=handoff,
            error=error,
            error_message=message,
        )

    def _failure(
        self, finish: FinishReason | None, stop_reason: int | str | None
    ) -> tuple[str | None, str | None]:
        if finish is not FinishReason.ERROR:
            return None, None
        if stop_reason == TOO_COSTLY:
            return TOO_COSTLY, "the schema, pattern or grammar of the output takes too long for each token"
        # A token of the engine's own shows that the KV is there.
        if self._fails_without_kv and self.request.leg is Leg.DECODE and not self._output_tokens:
            return "transfer_failed", "the prompt's KV did not arrive, and transfer.on_failure is fail"
        return "worker_failed", "the engine ended this request with an internal error"

    def _usage(self, cached: int, moved: Mapping[str, Any]) -> Usage:
        transferred = int(moved.get("transferred_tokens", 0))
        return Usage(
            prompt_tokens=len(self.request.tokens),
            # vLLM counts pulled tokens as cached too. After a failed pull it recounts.
            cached_tokens=max(0, cached - transferred),
            transferred_tokens=transferred,
            transferred_bytes=int(moved.get("transferred_bytes", 0)),
            output_tokens=self._output_tokens,
            tier_tokens=int(moved.get("tier_tokens", 0)),
        )

    def _positions(self, tokens: Sequence[int], logprobs: Any) -> tuple[PositionLogprobs, ...]:
        if self._logprobs is None or not logprobs:
            return ()
        return tuple(
            _position(token, candidates, self._logprobs)
            for token, candidates in zip(tokens, logprobs, strict=True)
        )

    def _prompt_positions(self, logprobs: Any) -> tuple[PositionLogprobs | None, ...]:
        """Once: every choice of the request has them."""
        wanted, self._prompt_logprobs = self._prompt_logprobs, None
        return tuple(
            None if candidates is None else _position(token, candidates, wanted or 0)
            for token, candidates in zip(self.request.tokens, logprobs, strict=True)
        )


def handoff_of(moved: Mapping[str, Any]) -> KvHandoff | None:
    """Return the hand-off that the connector returned with a PREFILL leg's last output; None if there is
    none."""
    if "ticket" not in moved:
        return None
    return KvHandoff(
        lease_id=str(moved["lease_id"]),
        fence=int(moved["fence"]),
        ttl_s=float(moved["ttl_s"]),
        blocks=int(moved["blocks"]),
        ticket=str(moved["ticket"]).encode(),
    )


def pull_of(handoff: KvHandoff) -> dict[str, Any]:
    """Return the same hand-off in the form that the decoding engine's connector reads."""
    return {
        "lease_id": handoff.lease_id,
        "fence": handoff.fence,
        "ttl_s": handoff.ttl_s,
        "blocks": handoff.blocks,
        "ticket": handoff.ticket.decode(),
    }


def _position(token: int, candidates: Any, wanted: int) -> PositionLogprobs:
    ranked = sorted(
        (candidate.rank, token_id, candidate)
        for token_id, candidate in candidates.items()
        if candidate.rank is not None and candidate.rank <= wanted
    )
    return PositionLogprobs(
        sampled=_logprob(token, candidates[token]),
        top=tuple(_logprob(token_id, candidate) for _, token_id, candidate in ranked),
    )


def _logprob(token_id: int, candidate: Any) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, token=candidate.decoded_token or "", logprob=candidate.logprob)


def _timings(metrics: Any, transfer_s: float, tier_s: float) -> Timings:
    """Return durations between the engine core's timestamps (vllm.v1.metrics.stats.RequestStateStats); a
    stage that was not reached has no timestamp and counts as zero."""
    if metrics is None:
        return Timings(transfer_s=transfer_s, tier_s=tier_s)

    def between(start: float, end: float) -> float:
        return max(0.0, end - start) if start and end else 0.0

    return Timings(
        # A leg that waits for its KV has not been scheduled yet: vLLM counts the wait as queueing.
        queue_s=max(0.0, between(metrics.queued_ts, metrics.scheduled_ts) - transfer_s - tier_s),
        prefill_s=between(metrics.scheduled_ts, metrics.first_token_ts),
        transfer_s=transfer_s,
        decode_s=between(metrics.first_token_ts, metrics.last_token_ts),
        tier_s=tier_s,
    )
