"""Which loads a calibration measures: prompts alone, prompts behind cached ones, streams, and bursts.

They cover what a step can be made of, so that each coefficient shows in some samples more than in others:
lengths of prompts for arithmetic and attention, numbers of streams and their contexts for the memory, prompts
that arrive together for what each of them costs beside its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORTEST, _LONGEST = 16, 16_384
_OUTPUT_TOKENS = 96
_UNCACHED_TOKENS = 32
_SHORT_CONTEXT = 64
_MOST_STREAMS, _MOST_TOKENS = 64, 32_768
"""Of all streams of one load together, so that their prompts do not take longer than what is measured."""
_KV_PART = 0.8
"""Part of the KV cache that one load may fill: without a preemption, or a request that waits."""


@dataclass(frozen=True, slots=True)
class CalibrationDesign:
    """The loads. Lengths in tokens: `prompts` alone, and `cached` prefixes before `uncached_tokens` others;
    `streams` are pairs of how many at a time and their prompts; `bursts` of so many prompts at a time, of
    `burst_tokens` each. `repeats` of each prompt and burst. Streams generate `output_tokens`. `beside` of
    them run at the same time as prompts of `beside_tokens` and of `burst_tokens`."""

    prompts: tuple[int, ...]
    cached: tuple[int, ...]
    uncached_tokens: int
    streams: tuple[tuple[int, int], ...]
    bursts: tuple[int, ...]
    burst_tokens: int
    repeats: int
    output_tokens: int
    beside: int
    beside_tokens: int

    @property
    def runs(self) -> int:
        """The number of loads, for the display of progress."""
        single = len(self.prompts) + len(self.cached) + len(self.bursts)
        return single + len(self.streams) + self.repeats


def design(
    max_model_len: int, max_num_seqs: int, kv_tokens: int, *, repeats: int = 5, quick: bool = False
) -> CalibrationDesign:
    """Return the loads for engines with such a context, batch and KV cache. `quick` has about a third of
    them."""
    output = min(_OUTPUT_TOKENS, max_model_len // 4)
    longest = min(_LONGEST, max_model_len - output - 1, kv_tokens - output - 1 if kv_tokens else _LONGEST)
    lengths = _doubling(_SHORTEST, longest)
    contexts = (_SHORT_CONTEXT, max(_SHORT_CONTEXT, longest // 2))
    room = int(_KV_PART * kv_tokens) if kv_tokens else _MOST_TOKENS
    numbers = _doubling(1, min(max_num_seqs, _MOST_STREAMS))
    streams = tuple(
        (number, context)
        for context in dict.fromkeys(contexts)
        for number in numbers
        if number * (context + output) <= min(room, _MOST_TOKENS)
    )
    bursts = tuple(each for each in (4, 16, 32) if each <= max_num_seqs and each * _SHORT_CONTEXT <= room)
    if quick:
        lengths, streams, bursts = lengths[::2], streams[::2], bursts[:1]
    return CalibrationDesign(
        prompts=lengths,
        cached=tuple(sorted({longest // 4, longest // 2, longest * 3 // 4})),
        uncached_tokens=_UNCACHED_TOKENS,
        streams=streams,
        bursts=bursts,
        burst_tokens=min(_SHORT_CONTEXT, longest),
        repeats=2 if quick else repeats,
        output_tokens=output,
        beside=min(4, max_num_seqs),
        beside_tokens=min(512, longest),
    )


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Return least, twice as many, and so on, up to `most` itself."""
    found = []
    value = least
    while value < most:
        found.append(value)
        value *= 2
    return (*found, most)
