"""The steps that calls for text and calls for embeddings share between their body and the router."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import (
    EMPTY_SAMPLING,
    OutputParsing,
    Request,
    RouteArm,
    Sampling,
    SloClass,
    Task,
    Usage,
)
from kvasir_platform.gateway.catalog.models import Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.serving.call_steps import ServedCall
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of
from kvasir_platform.gateway.tenants.caller import Caller, Charge
from kvasir_platform.gateway.tenants.wanted_place import ANYWHERE


class RoutedRun(Protocol):
    """What the router works on for one call. `worked`: a worker may have had any of it; `usage` is complete
    when the run reports its end."""

    @property
    def worked(self) -> bool: ...

    @property
    def usage(self) -> Usage: ...

    def abandon(self, error: KvasirError) -> None: ...


class RoutedApi:
    """An endpoint whose calls run in the router."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._active: set[RoutedRun] = set()

    def in_flight(self) -> int:
        """Number of calls in the router."""
        return len(self._active)

    def abandon_all(self, error: KvasirError) -> None:
        """End every call with `error`."""
        for run in list(self._active):
            run.abandon(error)


class RoutedCall(ServedCall):
    """A call that `served` answers. `active` has the runs of all calls that are in the router."""

    __slots__ = (
        "_active",
        "_charge",
        "_context",
        "_name",
        "_place",
        "_prefixes",
        "_route_arm",
        "_salt",
        "_served",
        "_slo",
        "_trace",
    )

    def __init__(
        self,
        context: GatewayContext,
        active: set[RoutedRun],
        caller: Caller,
        exchange: Exchange,
        *,
        served: Served,
        salt: str,
    ) -> None:
        super().__init__(caller, exchange, context.errors)
        headers = exchange.request.headers
        exchange.model = served.model.name
        self._context = context
        self._active = active
        self._served = served
        self._salt = caller.salt(salt)
        # A client that salts its requests wants none of its blocks to be shared.
        self._prefixes = None if salt else context.prefixes
        self._trace = trace_of(headers, context.spans)
        exchange.lines += trace_header(self._trace)
        self._slo: SloClass = caller.slo.asked_for(headers)
        # Ids must be unique, and a client may send its own request id twice.
        self._name = f"{exchange.request_id}-{context.suffix()}"
        self._charge: Charge | None = None
        self._route_arm: RouteArm | None = None
        self._place = ANYWHERE

    def _tokenize(self, prompts: Sequence[str | array[int]], *, add_special_tokens: bool) -> None:
        """Have `served` tokenize the prompts that are text."""
        self.model = self._served.model.name
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            self.encoded([])
            return
        self._served.model.tokenizers.encode(
            texts, self, add_special_tokens=add_special_tokens, salt=self._salt
        )

    def _request(
        self,
        tokens: array[int],
        number: int | None,
        *,
        priority: int,
        task: Task = Task.GENERATE,
        sampling: Sampling = EMPTY_SAMPLING,
        session: str = "",
        parsing: OutputParsing | None = None,
        second_text_at: int | None = None,
        media: tuple[PromptMedia, ...] = (),
    ) -> Request:
        """Return the router's request for a prompt; `number` is its place in a call with several."""
        salt, prefixes = self._salt, self._prefixes
        if prefixes is not None:
            salt = prefixes.salt(self.caller.tenant, self._served.model.name, tokens, salt)
        return Request(
            request_id=self._name if number is None else f"{self._name}-{number}",
            model=self._served.model.name,
            tokens=tokens,
            sampling=sampling,
            adapter=self._served.adapter,
            salt=salt,
            arrival_s=self.exchange.arrival_s,
            deadline_s=self.exchange.arrival_s + self._context.deployment.gateway.request_timeout_s,
            priority=priority,
            trace_context=self._trace.onward,
            slo=self._slo,
            session=session,
            task=task,
            parsing=parsing,
            tenant=self.caller.tenant,
            route_arm=self._route_arm,
            policy=self._place.policy,
            key=self.exchange.key,
            worker=self._place.worker,
            second_text_at=second_text_at,
            media=media,
        )

    def _begin(self, run: RoutedRun, charge: Charge) -> None:
        """Track the run until `_end`, which settles the charge."""
        self._charge = charge
        self._active.add(run)

    def _end(self, run: RoutedRun) -> None:
        """The run has ended, and nothing of it is in the router."""
        self._active.discard(run)
        if self._charge is None:
            raise AssertionError("a call ran without a charge")
        if run.worked:
            self._charge.settle(run.usage.prompt_tokens, run.usage.output_tokens)
        else:
            self._charge.release()
