"""How far each scheduled request's KV comes with one step, and in which blocks.

vLLM tells a connector of new blocks only as increments; but while a step's orders are made, its scheduler
resolves a request's whole block table on demand. So nothing is tracked here that could go out of step with
preemption or copies on write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class RequestProgress(NamedTuple):
    """One request in one step: tokens with KV `before` it, and `after` its forward. `resolve` finds a
    request's block ids by KV cache group."""

    request_id: str
    before: int
    after: int
    resolve: Callable[[str], tuple[list[int], ...]]

    def block_ids(self) -> list[int]:
        """All of the request's blocks in order; only while the step's orders are being made."""
        return self.resolve(self.request_id)[0]


def progress_of(scheduler_output: SchedulerOutput) -> Iterator[RequestProgress]:
    """Every request that the step computes, of an engine with one KV cache group.

    With asynchronous scheduling `before` counts steps that are still under way on the device."""
    state = scheduler_output.kv_connector_block_state
    if state is None:
        return
    scheduled = scheduler_output.num_scheduled_tokens
    fresh = ((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, before in [*fresh, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
        yield RequestProgress(request_id, before, before + scheduled[request_id], state.resolve_block_ids)
