"""What the edge's tokenizers do, read at scrape time: whether the fast one serves, what checking it found,
and what the tokens of earlier turns saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class TokenizerStats:
    """Of one model's tokenizer. `fast` is false where the reference serves."""

    fast: bool
    failures: int = 0
    audited: int = 0
    different: int = 0
    audits_failed: int = 0
    cached_segments: int = 0
    cached_bytes: int = 0
    found_characters: int = 0
    missed_characters: int = 0
    evicted_segments: int = 0


_GAUGES: tuple[tuple[str, str, Callable[[TokenizerStats], int]], ...] = (
    ("tokenizer_fast", "1 where the fast tokenizer serves, 0 for the reference", lambda s: s.fast),
    (
        "token_cache_segments",
        "Segments of earlier prompts whose tokens are kept",
        lambda s: s.cached_segments,
    ),
    ("token_cache_bytes", "Memory of those", lambda s: s.cached_bytes),
)
_COUNTERS: tuple[tuple[str, str, Callable[[TokenizerStats], int]], ...] = (
    ("tokenizer_failures", "Encodings at which the fast tokenizer failed", lambda s: s.failures),
    ("tokenizer_audited", "Prompts tokenized again by the reference", lambda s: s.audited),
    ("tokenizer_differences", "Those of them that came out otherwise", lambda s: s.different),
    ("tokenizer_audit_failures", "Audits that could not be done", lambda s: s.audits_failed),
    ("token_cache_found_characters", "Prompt text whose tokens were found", lambda s: s.found_characters),
    (
        "token_cache_missed_characters",
        "Prompt text that was looked up in vain",
        lambda s: s.missed_characters,
    ),
    ("token_cache_evicted_segments", "Segments dropped for want of room", lambda s: s.evicted_segments),
)


class TokenizerSeries(Collector):
    """Yields nothing until it is told what to read. `read` is by model."""

    def __init__(self) -> None:
        self.read: dict[str, Callable[[], TokenizerStats]] = {}

    def collect(self) -> Iterable[Metric]:
        """One family per size, one series per model."""
        sizes = {model: read() for model, read in self.read.items()}
        if not sizes:
            return
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"kvasir_{name}", text, labels=("model",))
            for model, size in sizes.items():
                gauge.add_metric((model,), value(size))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"kvasir_{name}", text, labels=("model",))
            for model, size in sizes.items():
                counter.add_metric((model,), value(size))
            yield counter
