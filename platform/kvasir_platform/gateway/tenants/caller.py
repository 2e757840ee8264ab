"""A tenant as the API sees it: what its requests may use, what they are charged, and how they are salted.

One object per tenant, made at start. A request makes a few calls; with limits in memory all of them return at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvasir.config.spec.tenants import PRIORITY_SPAN, TenantSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.ports.limits import BucketLevels, Grant, Limit, LimitRefusal, Quota, RateLimits
from kvasir.telemetry.tenant_series import TenantUsage
from kvasir_platform.gateway.catalog.models import no_such_model
from kvasir_platform.gateway.catalog.slo_classes import SloClasses
from kvasir_platform.gateway.tenants.buckets import charged, wait
from kvasir_platform.gateway.tenants.limit_headers import limit_headers
from kvasir_platform.gateway.tenants.memory_limits import GUESS_S
from kvasir_platform.gateway.tenants.salts import CacheScope, Open

_REFUSED: dict[Limit, tuple[str, str]] = {
    "requests": ("rate_limit_requests", "The limit is {0.requests_per_min} requests a minute"),
    "tokens": ("rate_limit_tokens", "The limit is {0.tokens_per_min} tokens a minute, output included"),
    "concurrency": ("concurrency_limit", "The limit is {0.concurrency} requests at the same time"),
    "budget": ("budget_exceeded", "The budget is spent"),
}


_KNOWN_S = 1.0
"""Seconds for which a decision of shared limits is remembered: others may return what they were charged."""
_OVER_ITS_SHARE = frozenset(("tenant_queue_full", "tenant_over_share"))


class LimitReached(CapacityError):
    """A limit of the tenant is exceeded. `header_lines` describe its state."""

    def __init__(self, message: str, *, code: str, retry_after_s: float, header_lines: bytes) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.header_lines = header_lines


class Charge:
    """The charge of one request. The first of `settle` and `release` ends it; further calls do nothing."""

    __slots__ = ("_caller", "_grant", "_limits", "_open")

    def __init__(self, caller: Caller, limits: RateLimits, grant: Grant | None) -> None:
        self._caller = caller
        self._limits = limits
        self._grant = grant
        self._open = True

    @property
    def header_lines(self) -> bytes:
        """Header lines for the response; empty if the tenant has no limits."""
        grant = self._grant
        return b"" if grant is None else limit_headers(grant.quota, grant.levels, grant.budget)

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Settle the charge of a request that a worker has processed, with both counts of its usage."""
        if self._close():
            self._caller.refunded()
            use = self._caller.use
            use.prompt_tokens += prompt_tokens
            use.output_tokens += output_tokens
            if self._grant is not None:
                self._limits.settle(self._grant, prompt_tokens + output_tokens)

    def release(self) -> None:
        """Refund a request that reached no worker."""
        if self._close() and self._grant is not None:
            self._caller.refunded()
            self._limits.release(self._grant)

    def _close(self) -> bool:
        if not self._open:
            return False
        self._open = False
        self._caller.use.running -= 1
        return True


class ChargeReceiver(Protocol):
    """Receives the decision of the rate limits: exactly one of the two methods is called, on the event
    loop."""

    def admitted(self, charge: Charge) -> None:
        """The call is admitted; settle or release the charge once."""
        ...

    def failed(self, error: BaseException) -> None:
        """The call is refused; nothing was charged."""
        ...


class Caller:
    """One tenant. `rank` is the number of its priority class, 0 the most urgent; `slo` are the SLO classes
    that it may use. `now` is monotonic, in seconds."""

    def __init__(
        self,
        spec: TenantSpec,
        rank: int,
        slo: SloClasses,
        scope: CacheScope | Open,
        limits: RateLimits,
        *,
        now: Callable[[], float],
    ) -> None:
        self.tenant = spec.name
        self.weight = spec.weight
        self.operator = spec.operator
        self.slo = slo
        self.use = TenantUsage(spec.name)
        self.salt = scope.salt
        """Return the salt for the KV of a request, given the client's own salt, or "" for none."""
        self._sessions = "" if isinstance(scope, Open) else f"{spec.name}\n"
        self._spec = spec
        self._first_priority = rank * PRIORITY_SPAN
        self._models = None if spec.models is None else frozenset(spec.models)
        quota = Quota(
            spec.requests_per_min, spec.tokens_per_min, spec.concurrency, budget=spec.budget is not None
        )
        self._quota = None if quota.unlimited else quota
        self._limits = limits
        self._now = now
        self._bytes_full_s = 0.0
        self._levels: BucketLevels | None = None
        """The buckets at the last decision; None if tokens or requests have been returned since."""
        self._levels_at = 0.0

    def refunded(self) -> None:
        """A charge has ended, so that the last decision says nothing of the next one."""
        self._levels = None

    def priority(self, asked: int | None) -> int:
        """Return a request's priority within the tenant's class for the `priority` of the client: 0 (or less)
        for the first in the class, more to queue behind others."""
        return self._first_priority + min(max(asked or 0, 0), PRIORITY_SPAN - 1)

    def session(self, named: str) -> str:
        """Return the router's name of the session that the client has `named`, "" for none. Sessions of
        different tenants never share a name."""
        return self._sessions + named if named else ""

    def may_use(self, model: str) -> bool:
        """Return whether the tenant may use a model or LoRA adapter."""
        return self._models is None or model in self._models

    def check_model(self, model: str) -> None:
        """Raise RequestError 404 for a model that this tenant may not use, with the same text as for an
        unknown one: model names can be secret."""
        if not self.may_use(model):
            raise no_such_model(model)

    def check_operator(self) -> None:
        """Raise RequestError 403 unless the tenant is an operator."""
        if not self.operator:
            raise RequestError("This needs an operator's API key.", status=403, code="operator_only")

    def check_size(self, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        """Raise RequestError for a prompt, or a requested output (None: not set), beyond the tenant's limits.
        `param` is the field that holds the prompt."""
        output, context = self._spec.max_output_tokens, self._spec.max_context_tokens
        if output is not None and max_tokens is not None and max_tokens > output:
            raise RequestError(
                f"max_tokens {max_tokens} exceeds your limit of {output} output tokens.",
                code="output_limit_exceeded",
                param="max_tokens",
            )
        if context is not None and prompt_tokens + (1 if max_tokens is None else max_tokens) > context:
            asked = f" and max_tokens is {max_tokens}" if max_tokens else ""
            raise RequestError(
                f"Your limit is {context} tokens of context; the prompt has {prompt_tokens}{asked}. "
                "Shorten the prompt or lower max_tokens.",
                code="context_length_exceeded",
                param=param,
            )

    def turned_away(self, code: str) -> None:
        """Count a request that the router has refused with this code, if the code concerns the tenant's own
        load."""
        if code in _OVER_ITS_SHARE:
            self.use.refused[code] = self.use.refused.get(code, 0) + 1

    def context(self, tokens: int) -> int:
        """Return this tenant's context limit for a model with this context."""
        most = self._spec.max_context_tokens
        return tokens if most is None else min(tokens, most)

    def default_output(self, tokens: int) -> int:
        """Return the output limit of a request without one, given the general default."""
        most = self._spec.max_output_tokens
        return tokens if most is None else min(tokens, most)

    def check_open(self, tokens: int) -> None:
        """Raise LimitReached if the limits would refuse any call of this many tokens at this moment: before
        its body is read or decoded, which costs more than the refusal. What is known here counts: running
        calls, and the last decision for as long as no other router can have changed it by much."""
        quota = self._quota
        if quota is None:
            return
        refusal = None
        if quota.concurrency is not None and self.use.running >= quota.concurrency:
            refusal = LimitRefusal("concurrency", GUESS_S, self._levels or BucketLevels())
        else:
            refusal = self._certain_refusal(quota, tokens, self._now() - self._levels_at)
        if refusal is not None:
            raise self._refused(quota, refusal)

    def check_body(self, size: int) -> None:
        """Raise LimitReached for a body of `size` bytes beyond the tenant's bytes per minute, and a
        RequestError 413 for one that exceeds a whole minute's."""
        per_min = self._spec.body_bytes_per_min
        if per_min is not None:
            self._with_body(size, per_min)

    def charge_body(self, size: int) -> None:
        """Charge a body that was read, before it is decoded. Raise as `check_body`, without a charge."""
        per_min = self._spec.body_bytes_per_min
        if per_min is not None:
            self._bytes_full_s = self._with_body(size, per_min)

    def _with_body(self, size: int, per_min: int) -> float:
        """Return when the bucket of bytes is full again after a body of `size`."""
        if size > per_min:
            raise RequestError(
                f"The body has {size} bytes, and your limit is {per_min} a minute.",
                status=413,
                code="body_too_large",
            )
        now = self._now()
        full_s = charged(self._bytes_full_s, now, size, per_min)
        left = wait(full_s, now)
        if left:
            code = "rate_limit_bytes"
            self.use.refused[code] = self.use.refused.get(code, 0) + 1
            raise LimitReached(
                f"The limit is {per_min} bytes of bodies a minute. Try again in {max(0.001, left):.3g} s.",
                code=code,
                retry_after_s=left,
                header_lines=b"",
            )
        return full_s

    def _certain_refusal(self, quota: Quota, tokens: int, age_s: float) -> LimitRefusal | None:
        """Return the refusal of a call, given the levels of `age_s` ago; None if it may be granted."""
        last = self._levels
        if last is None or age_s > _KNOWN_S:
            return None
        levels = BucketLevels(max(0.0, last.requests_s - age_s), max(0.0, last.tokens_s - age_s))
        buckets: tuple[tuple[Limit, int | None, float, int], ...] = (
            ("requests", quota.requests_per_min, levels.requests_s, 1),
            ("tokens", quota.tokens_per_min, levels.tokens_s, tokens),
        )
        for limit, per_min, level_s, amount in buckets:
            if per_min is not None and (left := wait(charged(level_s, 0.0, amount, per_min), 0.0)):
                return LimitRefusal(limit, left, levels)
        return None

    def admit(self, tokens: int, receiver: ChargeReceiver, *, counted: bool = True) -> None:
        """Charge a call that may use this many tokens, prompts and all output together. `receiver` gets the
        charge or the error: immediately if the router counts alone, else later on this event loop. A call
        that is admitted again once its tokens are known is not `counted` in the requests of the tenant."""
        quota = self._quota
        if quota is None:
            receiver.admitted(self._charge(None, counted))
            return
        if quota.tokens_per_min is not None and tokens > quota.tokens_per_min:
            receiver.failed(_too_large(tokens, quota.tokens_per_min))
            return

        def decided(verdict: Grant | LimitRefusal) -> None:
            self._levels, self._levels_at = verdict.levels, self._now()
            if isinstance(verdict, LimitRefusal):
                receiver.failed(self._refused(quota, verdict))
            else:
                receiver.admitted(self._charge(verdict, counted))

        self._limits.take(self.tenant, quota, tokens, decided)

    def _charge(self, grant: Grant | None, counted: bool) -> Charge:
        self.use.running += 1
        self.use.requests += counted
        return Charge(self, self._limits, grant)

    def _refused(self, quota: Quota, refusal: LimitRefusal) -> LimitReached:
        code, text = _REFUSED[refusal.limit]
        self.use.refused[code] = self.use.refused.get(code, 0) + 1
        why = f"{text.format(quota)}: {refusal.budget}" if refusal.budget else text.format(quota)
        return LimitReached(
            f"{why}. Try again in {max(0.001, refusal.retry_after_s):.3g} s.",
            code=code,
            retry_after_s=refusal.retry_after_s,
            header_lines=limit_headers(quota, refusal.levels, refusal.budget),
        )


def _too_large(tokens: int, per_min: int) -> RequestError:
    return RequestError(
        f"The request may use {tokens} tokens, and your limit is {per_min} a minute. Shorten the prompt, or "
        "lower max_tokens or n.",
        code="token_limit_too_small",
    )
