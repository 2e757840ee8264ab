"""Where the memory of a device goes, and how many users and how long a context it leaves room for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import (
    MOST_SEQUENCES,
    EngineOption,
    HardwareChoice,
    engine_option,
    engine_options,
)
from kvasir_platform.capacity.search import PlanRequest


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What KV in one precision has room for: `batch` requests of the load's mean context, `users` of
    `context` tokens each, and one request of `longest` tokens."""

    kv_dtype: str
    bytes_per_token: float
    batch: float
    users: float
    longest: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One kind of hardware with the smallest layout that fits, or with one device if none does. `context` is
    the length of the users' requests in tokens."""

    option: EngineOption
    context: int
    rooms: tuple[KvCapacity, ...]

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """What a device's memory holds, in bytes, by name."""
        found, working = self.option.fit, self.option.need.working
        return (
            ("weights", found.weights),
            ("activations", working.activations),
            ("CUDA graphs", working.graphs),
            ("libraries", working.libraries),
            ("KV", max(0, found.free)),
        )

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit, 0 if it fits."""
        return self.option.fit.missing


def memory_budgets(request: PlanRequest, context: int) -> tuple[MemoryBudget, ...]:
    """Return the budget of each kind of hardware."""
    return tuple(_budget(request, hardware, context) for hardware in request.hardware)


def _budget(request: PlanRequest, hardware: HardwareChoice, context: int) -> MemoryBudget:
    option = smallest(request, hardware) or engine_option(
        request.model,
        hardware,
        EngineShape(max_model_len=request.max_model_len, max_num_seqs=MOST_SEQUENCES),
        cores=hardware.count or 1,
    )
    rooms = tuple(_room(option, kv_dtype, request, context) for kv_dtype in ("auto", "fp8"))
    return MemoryBudget(option, context, rooms if option.fits and option.need.kv.request_blocks else ())


def smallest(request: PlanRequest, hardware: HardwareChoice) -> EngineOption | None:
    """Return the layout with the fewest devices that fits, None if none does."""
    options = engine_options(
        request.model,
        hardware,
        max_model_len=request.max_model_len,
        precision=request.precisions[0],
        chunk=2048,
    )
    return min(options, key=lambda option: option.devices, default=None)


def _room(option: EngineOption, kv_dtype: str, request: PlanRequest, context: int) -> KvCapacity:
    shape = replace(option.shape, kv_dtype=kv_dtype)
    held = replace(option, shape=shape, engine=replace(option.engine, shape=shape))
    return KvCapacity(
        kv_dtype="16 bits" if kv_dtype == "auto" else kv_dtype,
        bytes_per_token=held.engine.kv_token_bytes(),
        batch=held.requests(request.traffic.context),
        users=held.requests(context),
        longest=held.longest_context(),
    )
