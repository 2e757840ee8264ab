"""The KV memory of a simulated engine: what sequences hold, how streams grow, and who makes room.

Blocks are taken as they are needed (Kwon et al., PagedAttention, SOSP 2023). All streams grow by the same
number of tokens in a step, so what they need after k steps follows from their lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvasir.core.requests import Leg
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.engine.sequence import EngineLeg
from kvasir_platform.sim.replay.cache import BlockCache, Hit

_NO_NAMES = array("Q")


class KvRoom:
    """Reserves blocks for one engine. With batches that run to their end, all of a sequence's blocks are
    reserved when it begins, and its length does not change them."""

    def __init__(self, cache: BlockCache, block_tokens: int, options: BatchOptions) -> None:
        self.cache = cache
        self._block = block_tokens
        self._rate = options.tokens_per_step
        self._caches = options.prefix_cache
        self._held = self._upto = 0

    def blocks_of(self, tokens: float) -> int:
        """Return the blocks that hold so many tokens."""
        return int(-(-tokens // self._block))

    def admit(self, leg: EngineLeg, longest: int | None) -> bool:
        """Reserve what a sequence needs to begin: its prompt and one token, or `longest` output tokens.
        Return False, with nothing changed, if there is no room."""
        whole = longest is not None
        names = leg.names if self._caches and not leg.swapped else _NO_NAMES
        tokens = leg.base if leg.swapped else leg.target + (longest if longest is not None else 1)
        # Engines compute at least the last token of a prompt.
        most = (leg.target - 1) // self._block
        hit = self.cache.lookup(names, most) if len(names) else Hit(0, 0)
        blocks = self.blocks_of(tokens)
        if not self.cache.admit(names, hit, blocks):
            return False
        leg.hit, leg.filled = hit, 0
        leg.blocks, leg.growth = blocks, 0 if whole else 1
        return True

    def fill(self, leg: EngineLeg) -> None:
        """The prompt is complete: its blocks can be shared."""
        if self._caches and not leg.swapped:
            rest = leg.names[leg.hit.blocks :]
            leg.filled = self.cache.fill(rest)

    def join(self, leg: EngineLeg) -> None:
        """The sequence becomes a stream."""
        if leg.growth:
            self._held += leg.blocks

    def release(self, leg: EngineLeg, *, stream: bool, computed: bool) -> None:
        """Release all blocks of a sequence: of a stream, or of one whose prompt is `computed` or not."""
        held = leg.blocks
        if stream and leg.growth:
            held = max(held, self.blocks_of(leg.base + self._rate * (self._upto - 1)))
            self._held -= held
        filled = computed and self._caches and not leg.swapped
        shared = leg.names if filled else leg.names[: leg.hit.blocks]
        self.cache.release(shared, held - leg.hit.blocks - leg.filled)

    def needs(self, streams: Sequence[EngineLeg], steps: int) -> int:
        """Return how many more blocks the streams need for their steps up to number `steps`."""
        grown = self._rate * (steps - 1)
        block = self._block
        total = sum(-(-(each.base + grown) // block) for each in streams if each.growth)
        return int(total) - self._held

    def grow(self, streams: Sequence[EngineLeg], steps: int) -> None:
        """Reserve the blocks that streams need up to step number `steps`."""
        more = self.needs(streams, steps)
        self._upto = steps
        if more > 0:
            self.cache.resize(more)
            self._held += more

    def steps_within(self, streams: Sequence[EngineLeg], steps: int, most: int) -> int:
        """Return how many of the `most` steps from step number `steps` on have room, 0 for none."""
        room = self.cache.room
        if self.needs(streams, steps + most) <= room:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.needs(streams, steps + middle) <= room:
                low = middle
            else:
                high = middle
        return low


def restart(leg: EngineLeg, *, keeps_output: bool) -> None:
    """Let a preempted leg begin again: with its output as part of the prompt, or without output."""
    leg.generated = float(int(leg.generated)) if keeps_output else 0.0
    leg.target = leg.prompt_tokens + int(leg.generated)
    leg.computed = 0
    if leg.leg is Leg.DECODE:
        # The sender's blocks are gone: the prompt is computed here.
        leg.leg = Leg.FULL
