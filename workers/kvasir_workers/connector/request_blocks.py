"""The progress of each scheduled request's KV in one step, and its blocks.

vLLM reports new blocks to a connector only as increments; but while a step's orders are made, its scheduler
resolves a request's whole block table on demand. So this module keeps no copy, which preemption or
copy-on-write could invalidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


_ABSENT = 0
"""The id that vLLM's block tables have in place of a block before a sliding window."""


def absent_blocks(block_ids: Sequence[int]) -> int:
    """Return how many of these blocks, all of them first, a sliding window has left behind."""
    return next((at for at, block in enumerate(block_ids) if block != _ABSENT), len(block_ids))


class RequestProgress(NamedTuple):
    """One request in one step: tokens with KV `before` it, and `after` its forward pass. `resolve` returns a
    request's block ids by KV cache group."""

    request_id: str
    before: int
    after: int
    resolve: Callable[[str], tuple[list[int], ...]]

    def block_ids(self) -> list[int]:
        """Return all of the request's blocks in order. Valid only while the step's orders are being made."""
        return self.resolve(self.request_id)[0]


def progress_of(scheduler_output: SchedulerOutput) -> Iterator[RequestProgress]:
    """Return every request that the step computes, for an engine with one KV cache group.

    With asynchronous scheduling `before` includes steps that still run on the device.
    """
    state = scheduler_output.kv_connector_block_state
    if state is None:
        return
    scheduled = scheduler_output.num_scheduled_tokens
    fresh = ((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, before in [*fresh, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
        yield RequestProgress(request_id, before, before + scheduled[request_id], state.resolve_block_ids)
