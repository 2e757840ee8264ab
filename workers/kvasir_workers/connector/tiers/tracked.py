"""A request as the tier half of the connector sees it, from its arrival to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

NOTHING = range(0)


class TierRequest(Protocol):
    """The part of vLLM's Request that the connector's tier half reads."""

    request_id: str
    num_prompt_tokens: int
    num_preemptions: int
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    kv_transfer_params: dict[str, Any] | None
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...


@dataclass(slots=True)
class TrackedRequest:
    """One request from its arrival to its end.

    `blocks` are the device's ids of its leading full blocks, the first `given` of which it did not compute;
    `given` is None until it is scheduled. `fetch_from` is the first block of its fetch, None without one;
    `promised` is the number of blocks promised to vLLM, `loading` the number being loaded, `since` the time
    when it began to wait; `prefill` is what it computes of its prompt, in tokens, and when that began.
    `returning`: it was preempted and is not scheduled yet. `ended`: only its load still runs.
    """

    request: TierRequest
    names: array[int]
    blocks: list[int] = field(default_factory=list)
    given: int | None = None
    fetch_from: int | None = None
    promised: range = NOTHING
    loading: int = 0
    preemptions: int = 0
    returning: bool = False
    ended: bool = False
    since: float | None = None
    prefill: tuple[int, float] | None = None
    tier_tokens: int = 0
    tier_s: float = 0.0
