"""Generates a workload of a shape. The same source of randomness gives the same workload."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from kvasir.ports.clock import Rng
from kvasir_platform.workload.distributions import Zipf
from kvasir_platform.workload.requests import Workload, WorkloadRequest, block_names, named_under
from kvasir_platform.workload.shapes import WorkloadShape

_PREFIXES, _CONVERSATIONS = 1, 2


def generate(shape: WorkloadShape, rng: Rng, name: str = "") -> Workload:
    """The requests of `shape`, at least one."""
    requests = tuple(islice(_requests(shape, rng), shape.requests))
    return Workload(requests, shape.block, name)


@dataclass(slots=True)
class _Conversation:
    """What a conversation has said: `tokens` of it, behind whole blocks of a shared prefix."""

    number: int
    tenant: str
    parent: int
    shared: array[int]
    tokens: int

    def prompt(self, shape: WorkloadShape) -> array[int]:
        """Names of the whole blocks of all that was said."""
        own = range(len(self.shared), self.tokens // shape.block)
        return self.shared[: self.tokens // shape.block] + block_names(self.parent, own)


class _Conversations:
    """Begins conversations, and continues those whose next turn is due."""

    def __init__(self, shape: WorkloadShape, rng: Rng) -> None:
        self._shape = shape
        self._rng = rng
        self._popularity = Zipf(max(1, shape.prefixes), shape.zipf)
        # Two workloads share nothing, unless they are the same one.
        self._origin = rng.getrandbits(64)
        self._due: list[tuple[float, int, _Conversation]] = []
        self._begun = 0

    def next(self, now: float, more: int, output: int) -> _Conversation:
        """The one whose turn comes at `now`, with a message of `more` tokens and room for `output`."""
        while self._due and self._due[0][0] <= now:
            conversation = heappop(self._due)[2]
            if conversation.tokens + more + output <= self._shape.context:
                conversation.tokens += more
                return conversation
        begun = self._begin()
        begun.tokens += more
        return begun

    def ended_turn(self, conversation: _Conversation, now: float, output: int) -> None:
        """Its turn had `output` tokens of output. It may be its last."""
        conversation.tokens += output
        if self._rng.random() < 1.0 / self._shape.turns:
            return
        think = -math.log(1.0 - self._rng.random()) * self._shape.think
        heappush(self._due, (now + think, conversation.number, conversation))

    def _begin(self) -> _Conversation:
        shape, number = self._shape, self._begun
        self._begun += 1
        parent = named_under(named_under(self._origin, _CONVERSATIONS), number)
        tenant = f"tenant-{self._rng.randrange(shape.tenants)}" if shape.tenants > 1 else ""
        if not shape.prefixes or not shape.prefix:
            return _Conversation(number, tenant, parent, array("Q"), 0)
        chosen = named_under(named_under(self._origin, _PREFIXES), self._popularity.draw(self._rng))
        shared = block_names(chosen, range(shape.prefix // shape.block))
        return _Conversation(number, tenant, parent, shared, shape.prefix)


def _requests(shape: WorkloadShape, rng: Rng) -> Iterator[WorkloadRequest]:
    conversations = _Conversations(shape, rng)
    for number, drawn in enumerate(shape.process().times(rng)):
        if drawn >= shape.duration and number:
            return
        at = min(drawn, shape.duration)
        room = shape.context - shape.prefix
        output = 0 if shape.embeds else min(shape.output.draw(rng), room - 1)
        conversation = conversations.next(at, min(shape.prompt.draw(rng), room - output), output)
        yield WorkloadRequest(
            arrival_s=at,
            prompt_tokens=conversation.tokens,
            output_tokens=output,
            names=conversation.prompt(shape),
            embeds=shape.embeds,
            tenant=conversation.tenant,
            session=f"session-{conversation.number}" if shape.turns > 1.0 else "",
        )
        conversations.ended_turn(conversation, at, output)
