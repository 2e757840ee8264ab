"""Prometheus metrics of the tokenizers: which one is in use, its failures, and the token cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvasir.telemetry.families.scraped import SeriesTable, by_name, counter, gauge


@dataclass(frozen=True, slots=True)
class TokenizerStats:
    """Statistics of the tokenizer of one model. `fast` is False if the reference tokenizer is in use."""

    fast: bool
    failures: int = 0
    cached_segments: int = 0
    cached_bytes: int = 0
    found_characters: int = 0
    missed_characters: int = 0
    evicted_segments: int = 0


TOKENIZERS: SeriesTable[Mapping[str, TokenizerStats]] = SeriesTable(
    "kvasir_",
    ("model",),
    by_name,
    gauge("tokenizer_fast", "1 if the fast tokenizer is in use, 0 if the reference is", "fast"),
    gauge("token_cache_segments", "Prompt segments in the token cache", "cached_segments"),
    gauge("token_cache_bytes", "Memory used by the token cache", "cached_bytes"),
    counter("tokenizer_failures", "Encodings that failed in the fast tokenizer", "failures"),
    counter("token_cache_found_characters", "Prompt characters found in the token cache", "found_characters"),
    counter(
        "token_cache_missed_characters", "Prompt characters not found in the token cache", "missed_characters"
    ),
    counter("token_cache_evicted_segments", "Segments evicted from the token cache", "evicted_segments"),
)
