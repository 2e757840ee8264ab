"""Builds the output filters of a deployment from its spec."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.core.errors import ConfigError
from kvasir.ports.output_filter import AnswerPart, FilterSubject, OutputFilter
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.filters.filtered_answer import FilteredAnswer, FilteredChoice, Timers, watched_by
from kvasir_platform.gateway.filters.regex import RegexFilter
from kvasir_platform.gateway.http.outbound import Resolve, system_resolve
from kvasir_platform.gateway.openai.answer import Answer
from kvasir_platform.gateway.openai.calls import Call


class OutputFilters:
    """All filters of one gateway."""

    def __init__(self, filters: Sequence[OutputFilter], now: Callable[[], float]) -> None:
        self._filters = tuple(filters)
        self._now = now

    def around(self, answer: Answer, call: Call, *, choices: int, tenant: str) -> FilteredAnswer | None:
        """Return `answer` to `call` wrapped in the filters that apply, None if none does. `tenant` is ""
        without tenants."""
        if not self._filters:
            return None
        watched = watched_by(call, choices, tenant)
        filters = [each for each in self._filters if self._applies(each, watched)]
        if not filters:
            return None
        return FilteredAnswer(answer, filters, watched, now=self._now, timers=_loop_timers)

    async def close(self) -> None:
        """Close the filters. Call it when no response is running."""
        for each in self._filters:
            await each.close()

    def _applies(self, each: OutputFilter, watched: FilteredChoice) -> bool:
        return any(each.applies(FilterSubject(watched.model, part, watched.tenant)) for part in AnswerPart)


def output_filters(
    spec: OutputFiltersSpec,
    metrics: Metrics,
    *,
    now: Callable[[], float],
    rng: random.Random,
    resolve: Resolve = system_resolve,
) -> OutputFilters:
    """Return the filters of `spec`. Raise ConfigError for a named file that is invalid."""
    made: list[OutputFilter] = []
    for each in spec.regex:
        made.append(RegexFilter(each, _counter(metrics, each.name)))
    for one in spec.classifier:
        # The HTTP client takes megabytes that only gateways with a classifier should pay.
        from kvasir_platform.gateway.filters.classifier import ClassifierFilter

        try:
            made.append(
                ClassifierFilter.of(one, _counter(metrics, one.name), now=now, rng=rng, resolve=resolve)
            )
        except OSError as error:
            raise ConfigError(f"output_filters: {one.name}: {error}") from error
    return OutputFilters(made, now)


def _counter(metrics: Metrics, name: str) -> Callable[[str], None]:
    return lambda act: metrics.filter_acted(name, act)


def _loop_timers() -> Timers:
    return asyncio.get_running_loop().call_later
