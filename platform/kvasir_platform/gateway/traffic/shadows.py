"""Copies of requests for the shadow of a route: they run, are compared, and nobody is sent what they answer.

A copy is made after its request was admitted and sent to the router. It is charged to no tenant, has the last
priority of the last class, and is dropped rather than queued where that can be known: under a brown-out, for
a model without workers, beyond its bounds, and for a second after the router has refused one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.tenants import PRIORITY_SPAN
from kvasir.config.spec.traffic.routes import ShadowSpec
from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Request, RouteArm
from kvasir.ports.clock import Clock
from kvasir.ports.router import Lane, RequestPort, RequestSummary
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.catalog.models import EdgeModel, ModelTable, Served
from kvasir_platform.gateway.openai.answer import Answer
from kvasir_platform.gateway.openai.calls import Call
from kvasir_platform.gateway.traffic.choice import RoutedTo, uniform
from kvasir_platform.gateway.traffic.compared_text import ComparedText, TappedAnswer

_PAUSE_S: Final = 1.0


class Shadows:
    """Makes copies within the bounds of each route. `suffix` returns a short random string."""

    def __init__(
        self,
        deployment: Deployment,
        models: ModelTable,
        router: RequestPort,
        *,
        metrics: Metrics,
        clock: Clock,
        suffix: Callable[[], str],
    ) -> None:
        self.router = router
        self._clock = clock
        self._models = models
        self._metrics = metrics
        self._suffix = suffix
        self._priority = len(deployment.tenancy.priorities) * PRIORITY_SPAN - 1
        self._running: Counter[str] = Counter()
        self._paused_until_s: dict[str, float] = {}

    def copy_of(
        self,
        routed: RoutedTo,
        requests: Sequence[Request],
        *,
        body_bytes: int,
        served: EdgeModel,
        salt: str,
        call_for: Callable[[EdgeModel], Call],
    ) -> ShadowCopy | None:
        """Return a copy of a call that `served` answers, to begin once that call has been sent; None for a
        call that is not drawn, that the shadow's model answers itself, is larger than what is copied, has
        several prompts or choices, or is dropped. `salt` is the tenant's, and `call_for` renders the call for
        another model."""
        spec, request = routed.shadow, requests[0]
        if spec is None or routed.chain[0] == spec.model or len(requests) > 1 or request.sampling.n > 1:
            return None
        drawn = uniform("shadow", routed.route, request.request_id) < spec.share
        if not drawn or body_bytes > spec.max_body_bytes:
            return None
        arm, shadow = RouteArm(routed.route, spec.model), self._models.find(spec.model)
        if self._overloaded(arm, shadow, spec):
            self._metrics.shadowed(arm, "dropped")
            return None
        self._running[arm.route] += 1
        same = shadow.model.tokenizers is served.tokenizers
        # What tenants share of a prompt is known for the model that answers.
        made = replace(self._request(request, shadow, spec), salt=salt)
        return ShadowCopy(self, arm, shadow, made, None if same else call_for)

    def refused(self, arm: RouteArm) -> None:
        """The router refused a copy: make no more for a while."""
        self._paused_until_s[arm.route] = self._clock.now() + _PAUSE_S

    def ended(self, arm: RouteArm, outcome: str, summary: RequestSummary | None) -> None:
        """Count a copy that has ended."""
        self._running[arm.route] -= 1
        self._metrics.shadowed(arm, outcome, summary)

    def _overloaded(self, arm: RouteArm, shadow: Served, spec: ShadowSpec) -> bool:
        if self._running[arm.route] >= spec.max_concurrency:
            return True
        if self._clock.now() < self._paused_until_s.get(arm.route, 0.0):
            return True
        name = shadow.model.name
        return bool(self.router.brownout(name).level) or self.router.not_ready_models().get(name) is not None

    def _request(self, request: Request, shadow: Served, spec: ShadowSpec) -> Request:
        now, limit, sampling = self._clock.now(), request.sampling.max_tokens, request.sampling
        most = spec.max_tokens if limit is None else min(limit, spec.max_tokens)
        return replace(
            request,
            request_id=f"{request.request_id}-shadow-{self._suffix()}",
            model=shadow.model.name,
            adapter=shadow.adapter,
            sampling=replace(sampling, max_tokens=most, min_tokens=min(most, sampling.min_tokens)),
            arrival_s=now,
            deadline_s=now + spec.timeout_s,
            priority=self._priority,
            trace_context="",
            session="",
            tenant="",
            route_arm=None,
            policy="",
            worker="",
        )


class ShadowCopy:
    """One copy: the router's sink for it, and the tokenizer's receiver. Texts are compared if the request is
    greedy, once both have ended in any way. `call_for` is None if the shadow tokenizes as the model that
    answers. Its methods are called on the event loop, and never raise."""

    def __init__(
        self,
        shadows: Shadows,
        arm: RouteArm,
        shadow: Served,
        request: Request,
        call_for: Callable[[EdgeModel], Call] | None,
    ) -> None:
        self._shadows = shadows
        self._arm = arm
        self._shadow = shadow
        self._request = request
        self._call_for = call_for
        self._compares = request.sampling.temperature == 0.0
        self._mine = ComparedText()
        self._theirs = ComparedText()
        self._summary: RequestSummary | None = None
        self._call_over = False
        self._open = True

    def tapped(self, answer: Answer) -> Answer:
        """Return the answer of the request, whose text is compared."""
        return TappedAnswer(answer, self._theirs) if self._compares else answer

    def withdraw(self) -> None:
        """The request was refused: there is nothing to compare."""
        self._end("dropped")

    def call_ended(self) -> None:
        """The call has ended: answered, failed, continued with another model, or left by its client."""
        self._call_over = True
        if self._compares:
            self._compare()

    def begin(self) -> None:
        """Send the copy, after its prompt was tokenized again if the models differ in that."""
        if self._call_for is None:
            self._submit()
            return
        try:
            call = self._call_for(self._shadow.model)
            (prompt,) = call.prompts
            if not isinstance(prompt, str):
                self.encoded([prompt])
                return
            self._shadow.model.tokenizers.encode(
                [prompt], self, add_special_tokens=call.add_special_tokens, salt=self._request.salt
            )
        except KvasirError as error:
            self.failed(error)

    def encoded(self, ids: list[array[int]]) -> None:
        """The prompt was tokenized."""
        (tokens,) = ids
        room = self._shadow.model.context - len(tokens)
        if room < 1:
            self._end("failed")
            return
        sampling = self._request.sampling
        limited = replace(sampling, max_tokens=min(sampling.max_tokens or room, room))
        self._request = replace(self._request, tokens=tokens, block_hashes=array("Q"), sampling=limited)
        self._submit()

    def failed(self, error: BaseException) -> None:
        """The prompt cannot be used with the shadow's model."""
        self._end("failed")

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink: kept for the comparison, and sent to nobody."""
        if self._compares:
            self._mine.add(delta)

    def lane(self, request_id: str) -> Lane | None:
        """See StreamSink: there is no client."""
        return None

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._summary, self._mine.ended = summary, True
        if self._compares:
            self._compare()
        else:
            self._end("sampled")

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._shadows.refused(self._arm)
        self._end("dropped" if summary.refused else "failed")

    def _submit(self) -> None:
        try:
            self._shadows.router.submit(self._request, self)
        except KvasirError:
            self._shadows.refused(self._arm)
            self._end("dropped")

    def _compare(self) -> None:
        """End if neither text grows any more."""
        if not self._mine.ended or not self._call_over:
            return
        if not self._theirs.ended:
            self._end("unmatched")
        else:
            self._end("equal" if self._mine.agrees(self._theirs) else "different")

    def _end(self, outcome: str) -> None:
        if self._open:
            self._open = False
            self._shadows.ended(self._arm, outcome, self._summary)
